"""Weights that are tied, shared, frozen, derived from others, or written to in part."""

from fuzz.registry import add, lines

_W = "self.w$k = weight($D, $D)"
_UV = "self.u$k = weight($D, $D)\nself.v$k = weight($D, $D)"

add("tied", "h = F.linear(self.a$k(h), self.a$k.weight.T)", "self.a$k = nn.Linear($D, $D)")
add("shared", "h = self.a$k(self.a$k(h).tanh())", "self.a$k = nn.Linear($D, $D)")
add("tied_modules", "h = self.a$k(self.b$k(h))", """
    self.a$k = nn.Linear($D, $D)
    self.b$k = nn.Linear($D, $D)
    self.b$k.weight = self.a$k.weight
    """)
add("registered_twice", "h = self.b$k(self.a$k(h))", """
    self.a$k = nn.Linear($D, $D)
    self.b$k = self.a$k
    """, rate=0.5)
add("frozen", "h = self.a$k(h)", """
    self.a$k = nn.Linear($D, $D)
    self.a$k.<<weight|bias>>.requires_grad_(False)
    """)
add("derived", "h = F.linear(h, self.w$k.<<exp()|tanh()|square()|abs()|softmax(0)|tril()|neg()>>)",
    _W, classes=(14,))
add("scaled_weight", "h = F.linear(h, self.w$k / self.w$k.norm())", _W)
add("normalised_rows", "h = h @ F.normalize(self.w$k, dim=<<0|1>>)", _W)
add("product_of_weights", "h = h @ (self.u$k @ self.v$k)", _UV)
add("sum_of_weights", "h = F.linear(h, self.u$k <<+|*|->> self.v$k)", _UV)
add("low_rank", "h = h @ self.u$k @ self.v$k", """
    self.u$k = weight($D, 2)
    self.v$k = weight(2, $D)
    """)
add("stacked_weights", "h = h @ torch.stack([self.u$k, self.v$k]).<<mean(0)|sum(0)>>", _UV)
add("cat_weights", "h = (h @ torch.cat([self.u$k, self.v$k], 1))[..., :$D]", _UV)
add("cat_rows", "h = F.linear(h, torch.cat([self.u$k, self.v$k])[1:$D + 1])", _UV)
add("permuted_weight", "h = h @ self.w$k[self.p$k]",
    lines(_W, "self.register_buffer('p$k', torch.randperm($D))"),
    between="model.p$k.copy_(torch.randperm($D))")
add("rows_of_weight", "h = h @ self.w$k[1:$D + 1]", "self.w$k = weight($D + 2, $D)")
add("expanded_weight", "h = h * self.w$k.expand($D, $D)[0]", "self.w$k = weight(1, $D)")
add("repeated_weight", "h = h * self.w$k.repeat($D)", "self.w$k = weight(1)")
add("masked_weight", "h = F.linear(h, self.w$k * self.m$k)",
    lines(_W, "self.register_buffer('m$k', torch.ones($D, $D).tril())"))
add("masked_weight_where", "h = F.linear(h, torch.where(self.w$k > 0, self.w$k, self.w$k * 2))", _W)
add("viewed_weight", "h = h @ self.w$k.view($D, $D)", "self.w$k = weight($D * $D)")
add("unflattened", """
    w, b = self.w$k.split([$D * $D, $D])
    h = F.linear(h, w.view($D, $D), b)
    """, "self.w$k = weight($D * $D + $D)")
add("elements_of_weight", "h = h * self.w$k[0] + self.w$k[1, 0]", _W)
add("scalar_of_weight", "h = h * self.w$k.<<mean()|sum()|amax()|std()>>", _W)
add("gate", "h = self.g$k * h + (1 - self.g$k) * h.sin()", "self.g$k = weight(1)")
add("residual_scale", "h = torch.lerp(h, h.tanh(), self.w$k)", "self.w$k = weight($D)")
add("weight_norm", "h = self.a$k(h)",
    "self.a$k = nn.utils.parametrizations.weight_norm(nn.Linear($D, $D))", rate=0.2)
add("orthogonal", """
    q = torch.linalg.qr(self.w$k)[0]
    h = h @ q
    """, _W, rate=0.3)
add("inverse", "h = h @ torch.linalg.inv(self.w$k + 9 * torch.eye($D))", _W, rate=0.3)
add("matrix_exp", "h = h @ torch.matrix_exp(self.w$k)", _W, rate=0.3)
add("weight_of_ids", "h = h + self.u$k[ids[:, 0]] @ self.v$k", """
    self.u$k = weight(5, $D)
    self.v$k = weight($D, $D)
    """, kind="vec")
add("expert_of_sample", "h = torch.einsum('bd,bde->be', h, self.w$k[ids[:, 0] % 2])",
    "self.w$k = weight(2, $D, $D)", kind="vec")
add("positions", "h = h + self.w$k[:$T]", "self.w$k = weight($T + 1, $D)", kind="seq")
add("positions_looked_up", "h = h + self.e$k(torch.arange($T))",
    "self.e$k = nn.Embedding($T + 1, $D)", kind="seq")
add("token", "h = torch.cat([self.w$k.expand($B, 1, $D), h], 1)[:, :$T]",
    "self.w$k = weight(1, 1, $D)", kind="seq")
add("weight_by_weight_of_batch", "h = (self.w$k.expand($B, $D, $D) @ h.unsqueeze(-1)).squeeze(-1)",
    _W, kind="vec")
add("mix_steps", "h = self.w$k @ h", "self.w$k = weight($T, $T)", kind="seq")
add("mix_steps_viewed",
    "h = (self.w$k @ h.transpose(1, 2)).view($B, -1).view($B, $D, $T).transpose(1, 2)", _W,
    kind="seq", classes=(14,))
add("mix_vec_viewed", "h = (self.w$k @ h.unsqueeze(-1)).view($B, -1)", _W, kind="vec",
    classes=(14,))
add("weight_left", "h = (self.w$k @ h.T).T", _W, kind="vec")
add("weight_left_viewed", "h = (self.w$k @ h.T).t().view($B, -1)", _W, kind="vec", classes=(14,))

# Written to in part: a write through a view is a write to its base.
add("cloned_column", """
    w = self.w$k.clone()
    w[:, 1].mul_(3)
    h = F.linear(h, w)
    """, _W, classes=(6,))
add("cloned_row", """
    w = self.w$k.clone()
    w[0] = <<0|w[1]|self.w$k[1] * 2>>
    h = F.linear(h, w)
    """, _W, classes=(6,))
add("cloned_view", """
    w = self.w$k.clone()
    v = w.<<view(-1)|t()|diagonal()>>
    v<<.mul_(2)|.add_(1)|.zero_()|[0] = 0>>
    h = h @ w
    """, _W, classes=(6,))
add("stale_weight_view", """
    w = self.w$k.clone()
    v = w[0]
    w.mul_(2)
    h = h @ w + v
    """, _W, classes=(6,))
add("weight_written", """
    w = torch.zeros($D, $D)
    w[1:] = self.w$k[1:]
    h = h @ w
    """, _W, classes=(6,))
add("weight_filled", """
    w = torch.zeros($D, $D).<<copy_(self.w$k)|add_(self.w$k)|index_copy_(0, torch.arange($D), self.w$k)>>
    h = h @ w
    """, _W, classes=(6,))
add("weight_scattered", """
    w = torch.zeros($D, $D).index_put((torch.arange($D), torch.arange($D)), self.w$k)
    h = h @ w
    """, "self.w$k = weight($D)", classes=(6,))
