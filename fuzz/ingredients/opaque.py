"""Functions that hide what they do: autograd.Functions, scripted, vmapped and compiled ones, namesakes."""

from fuzz.registry import add, lines

_A = "self.a$k = nn.Linear($D, $D)"
_W = "self.w$k = weight($D, $D)"

add("scripted", "h = scripted_swish(h)", classes=(1,), rate=0.6)
add("scripted_linear", "h = scripted_linear(h, self.w$k)", _W, classes=(1,), rate=0.3)
add("scripted_of_weight", "h = h @ scripted_swish(self.w$k)", _W, classes=(1,), rate=0.3)
add("vmapped", "h = torch.vmap(torch.<<sin|tanh>>)(h)", classes=(1,))
add("vmapped_over_features", "h = torch.vmap(torch.tanh, in_dims=-1, out_dims=-1)(h)", classes=(1,))
add("vmapped_layer", "h = torch.vmap(self.a$k)(h)", _A, classes=(1,))
add("vmapped_weight", "h = torch.vmap(torch.mul, in_dims=(0, None))(h, self.w$k)",
    "self.w$k = weight($D)", classes=(1,))
add("vmapped_function", "h = torch.vmap(lambda row: row - row.mean())(h)", classes=(1,))
add("vmap_of_grad", "h = torch.vmap(torch.func.grad(lambda row: row.sin().sum()))(h)", classes=(1,),
    rate=0.5)
add("jvp", "h = torch.func.jvp(torch.sin, (h,), (torch.ones_like(h),))[1]", classes=(1,), rate=0.5)
add("function", "h = Swish.apply(h)", classes=(1, 2))
add("numpy_function", "h = NumpySin.apply(h)", classes=(1,))
add("numpy_function_of_weight", "h = h @ NumpySin.apply(self.w$k)", _W, classes=(1,), rate=0.5)
add("function_of_weight", "h = Linear.apply(h, self.w$k)", _W, classes=(1, 2))
add("function_of_derived", "h = h @ Swish.apply(self.w$k)", _W, classes=(1, 10))
add("random_function_of_weight", "h = h @ DroppedWeight.apply(self.w$k)", _W, classes=(10,),
    rate=0.5)
add("random_function", "h = DroppedWeight.apply(h)", classes=(10,), rate=0.3)
add("recomputed", "h = Recompute.apply(self.a$k, h, *self.a$k.parameters())", _A, classes=(10,),
    rate=0.15, may_refuse=True)
add("random_function_of_both", "h = DroppedLinear.apply(h, self.w$k)", _W, classes=(10,), rate=0.3)
add("adjoint",
    "h = Adjoint.apply(self.a$k, h, torch.cat([p.flatten() for p in self.a$k.parameters()]))", _A,
    classes=(10,), rate=0.15, may_refuse=True)
add("namesake", "h = silu(h)", classes=(7,), rate=0.5)
add("patched_attention", "h = F.scaled_dot_product_attention(h, h, h)", kind="seq", classes=(7,),
    rate=0.3, between="F.scaled_dot_product_attention = doubled_attention",
    after="F.scaled_dot_product_attention = torch_attention")
add("patched_inside", "h, _ = self.a$k(h, h, h, need_weights=False)",
    "self.a$k = nn.MultiheadAttention($D, 1, batch_first=True)", kind="seq", classes=(7,), rate=0.3,
    between="F.scaled_dot_product_attention = doubled_attention",
    after="F.scaled_dot_product_attention = torch_attention")
add("left_on_module", "h = h * self.left$k", """
    self.w$k = weight($D)
    self.left$k = self.w$k <<+ 1|- 2>>
    """, classes=(1,), rate=0.15, may_refuse=True)
add("outer_parameter", "h = F.linear(h, self.a$k.weight <<@|*|+>> self.outer$k[0])",
    lines(_A, "self.outer$k = [weight($D, $D)]"), classes=(1,), rate=0.3)
add("outer_scale", "h = self.a$k(h) * self.outer$k[0]", lines(_A, "self.outer$k = [weight($D)]"),
    classes=(1,), rate=0.3)
add("compiled_function", "h = compiled_swish(h)", classes=(12,), rate=0.015)
add("from_numpy", "h = h * torch.from_numpy(np.arange(1.0, $D + 1.0))")
add("from_data", "h = h + torch.tensor(h.detach().tolist())", rate=0.5)
add("gradient_inside", """
    u = h.detach().requires_grad_()
    (g,) = torch.autograd.grad(u.sin().sum(), u)
    h = h * g
    """, rate=0.3)
add("item", "h = torch.stack([row * row.detach().sum().item() for row in h])", rate=0.3)
add("vmapped_jacobian", "h = torch.vmap(torch.func.jacrev(lambda u: self.a$k(u).tanh()))(h).sum(-1)",
    _A, kind="vec", classes=(1,), rate=0.5)
