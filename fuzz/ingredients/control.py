"""Control flow in Python: loops over positions and samples, checkpoints, branches."""

from fuzz.registry import add, lines

_A = "self.a$k = nn.Linear($D, $D)"

add("loop_over_samples", "h = torch.stack([self.a$k(row) for row in h])", _A)
add("loop_over_slices", "h = torch.cat([self.a$k(h[n:n + 1]) for n in range($B)])", _A)
add("loop_over_indices", "h = torch.stack([self.a$k(h[n]).tanh() for n in range($B)])", _A,
    classes=(8,))
add("loop_in_order", """
    out = [None] * $B
    for n in torch.randperm($B).tolist():
        out[n] = self.a$k(h[n])
    h = torch.stack(out)
    """, _A, classes=(8,))
add("loop_over_ids", "h = h + torch.stack([self.w$k[int(i)] for i in ids[:, 0]])",
    "self.w$k = weight(5, $D)", kind="vec", classes=(8,))
add("loop_over_rows_of_ids", "h = h + torch.stack([self.e$k(row).sum(0) for row in ids])",
    "self.e$k = nn.Embedding(5, $D)", kind="vec", classes=(8,))
add("ids_by_integer", "h = h + torch.stack([self.e$k(ids[n, <<0|-1>>]) for n in range($B)])",
    "self.e$k = nn.Embedding(5, $D)", kind="vec", classes=(8,))
add("split_samples", "h = torch.cat([self.a$k(u) for u in h.split(1)])", _A)
add("unbound_samples", "h = torch.stack([self.a$k(u) for u in h.unbind(0)])", _A)
add("loop_over_steps", "h = torch.stack([self.a$k(h[:, t]) for t in range($T)], 1)", _A, kind="seq")
add("loop_over_unbound", "h = torch.stack([self.a$k(u) for u in h.unbind(1)], 1)", _A, kind="seq")
add("time_first_inside", "h = self.a$k(h.transpose(0, 1)).transpose(0, 1)", _A, kind="seq")
add("recurrent_time_first", "h = self.a$k(h.transpose(0, 1))[0].transpose(0, 1)",
    "self.a$k = nn.GRU($D, $D)", kind="seq", rate=0.3)
add("cell", """
    c = torch.zeros($B, $D)
    for t in range($T):
        c = self.a$k(h[:, t], c)
    h = c
    """, "self.a$k = nn.GRUCell($D, $D)", kind="seq", to="vec", rate=0.4)
add("lengths", "h = torch.stack([self.a$k(h[n, :int(mask[n].sum())]).sum(0) for n in range($B)])",
    _A, kind="seq", to="vec")
add("packed", """
    s = nn.utils.rnn.pack_padded_sequence(h, mask.sum(1), batch_first=True, enforce_sorted=False)
    h = self.a$k(s)[1][-1]
    """, "self.a$k = nn.GRU($D, $D, batch_first=True)", kind="seq", to="vec", rate=0.3)
add("checkpoint", "h = checkpoint(self.a$k, h, use_reentrant=False)", _A, rate=0.5)
add("checkpoint_function", "h = checkpoint(lambda u: self.a$k(u).tanh(), h, use_reentrant=False)",
    _A, rate=0.5)
add("branch", """
    if h.shape[0] > 2:
        h = self.a$k(h)
    else:
        h = h.sin()
    """, _A)
add("no_grad", """
    with torch.no_grad():
        u = self.a$k(h)
    h = h + u
    """, _A)
add("functional_call",
    "h = torch.func.functional_call(self.a$k, dict(self.a$k.named_parameters()), (h,))", _A,
    rate=0.3)
add("hooked_module", "h = self.a$k(h)",
    lines(_A, "self.a$k.register_forward_hook(lambda m, i, o: o.sin())"), rate=0.5)
add("two_branches", "h = self.a$k(h) * self.b$k(h).sigmoid()",
    lines(_A, "self.b$k = nn.Linear($D, $D)"))
add("repeat", """
    for _ in range(2):
        h = self.a$k(h).tanh()
    """, _A)
add("tensor_hook", """
    h = self.a$k(h)
    if h.requires_grad:
        h.register_hook(lambda g: g * 2)
    """, _A, rate=0.5)
add("stacked_scalars",
    "h = h * torch.stack([self.a$k(row).sum() for row in h]).view(-1, *[1] * (h.dim() - 1))", _A,
    classes=(8,))
