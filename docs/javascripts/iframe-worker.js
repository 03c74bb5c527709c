// Browsers start no workers for pages opened from a folder (file://). There, the search of the site runs in a
// hidden frame instead, which gets and sends the messages of a worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      this.frame = frame;
      this.forward = (event) => {
        if (event.source !== inner) return;
        const copy = new MessageEvent("message", { data: event.data });
        if (this.onmessage) this.onmessage(copy);
        this.dispatchEvent(copy);
      };
      window.addEventListener("message", this.forward);
      const start = inner.document.createElement("script"); // in the frame, so that it is the sender
      start.text = 'window.postMessage = function (data) { parent.postMessage(data, "*"); };';
      inner.document.body.append(start);
      inner.importScripts = (...addresses) =>
        addresses.reduce((done, address) => done.then(() => load(inner, address)), Promise.resolve());
      this.ready = load(inner, url);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      window.removeEventListener("message", this.forward);
      this.frame.remove();
    }
  };

  function load(inner, address) {
    return new Promise((resolve, reject) => {
      const script = inner.document.createElement("script");
      script.src = address;
      script.onload = () => resolve();
      script.onerror = () => reject(new Error(`cannot load ${address}`));
      inner.document.body.append(script);
    });
  }
}
