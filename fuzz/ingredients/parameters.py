"""Parameters with hooks, made or replaced in the forward, complex; and modes of running a program."""

from fuzz.registry import add, lines

_A = "self.a$k = nn.Linear($D, $D)"
_COMPLEX = "self.w$k = nn.Parameter(torch.randn($D, $D, dtype=torch.complex128))"

add("hooked_parameter", "h = self.a$k(h)",
    lines(_A, "self.a$k.<<weight|bias>>.register_hook(lambda g: g * 2)"), classes=(9,), rate=0.1,
    may_refuse=True)
add("clamped_gradient", "h = self.a$k(h)",
    lines(_A, "self.a$k.weight.register_hook(lambda g: g.clamp(-0.1, 0.1))"), classes=(9,),
    rate=0.1, may_refuse=True)
add("made_in_forward", """
    if self.a$k is None:
        self.a$k = nn.Linear($D, $D)
    h = self.a$k(h)
    """, "self.a$k = None", classes=(9,), rate=0.1, may_refuse=True)
add("lazy_layer", "h = self.a$k(h)", "self.a$k = nn.LazyLinear($D)", classes=(9,), rate=0.1,
    may_refuse=True)
add("assigned_in_forward", """
    self.w$k = nn.Parameter(self.w$k.detach() * 2)
    h = h * self.w$k
    """, "self.w$k = weight($D)", classes=(9,), rate=0.1, may_refuse=True)
add("complex_weight", "h = (h.to(torch.complex128) @ self.w$k).<<abs()|real|imag>>", _COMPLEX,
    classes=(9,), rate=0.2)
add("complex_scale", "h = torch.view_as_real(h * self.w$k).sum(-1)",
    "self.w$k = nn.Parameter(torch.randn($D, dtype=torch.complex128))", classes=(9,), rate=0.2)
add("complex_from_real", "h = (h.to(torch.complex128) @ torch.view_as_complex(self.w$k)).real",
    "self.w$k = weight($D, $D, 2)", classes=(9,), rate=0.2)
add("spectral", "h = torch.fft.irfft(torch.fft.rfft(h) * self.w$k, n=$D)",
    "self.w$k = nn.Parameter(torch.randn($D // 2 + 1, dtype=torch.complex128))", classes=(9,),
    rate=0.2)
add("unused", "h = h.sin()", _A, rate=0.5)
add("float_weight", "h = h @ self.w$k.double()",
    "self.w$k = nn.Parameter(torch.randn($D, $D).float())", rate=0.2)

# Modes of running, as steps so that shrinking can drop them.
add("in_halves", "h = self.a$k(h)", _A, classes=(14,), rate=0.05, mode="bf16")
add("in_compiled_step", "h = self.b$k(self.a$k(h).tanh())",
    lines(_A, "self.b$k = <<self.a$k|nn.Linear($D, $D)>>"), classes=(11,), rate=0.01,
    mode="compiled")
add("in_compiled_block", "h = self.a$k.block(h)", """
    self.a$k = nn.Module()
    self.a$k.block = nn.Linear($D, $D)
    self.again$k = self.a$k
    """, classes=(11,), rate=0.01, mode="compiled")
