"""Views and writes in place: a write through a view is a write to its base."""

from fuzz.registry import add, lines

_A = "self.a$k = nn.Linear($D, $D)"

add("column_scaled", """
    h = h.clone()
    h[..., 0].mul_(2)
    """, classes=(6,))
add("column_written", """
    u = self.a$k(h)
    u[..., 0] = <<0|h[..., 1]|u[..., 1]>>
    h = u
    """, _A, classes=(6,))
add("flat_view_written", """
    u = h * 1.0
    v = u.view(-1)
    v.<<mul_(2)|tanh_()|add_(1)>>
    h = u
    """, classes=(6,))
add("transposed_view_written", """
    u = h * 1.0
    u.transpose(0, -1).mul_(2)
    h = u
    """, classes=(6,))
add("stale_view", """
    u = h * 1.0
    v = u[..., 0]
    u.mul_(3)
    h = u + v.unsqueeze(-1)
    """, classes=(6,))
add("view_of_buffer", """
    buf = torch.zeros($B, 2, $D)
    v = buf[:, 0]
    buf[:, 0] = self.a$k(h)
    h = v
    """, _A, kind="vec", classes=(6,))
add("view_read_after_write", """
    buf = torch.zeros($B, 2, $D)
    v = buf.select(1, 1)
    buf[:, 1].copy_(self.a$k(h))
    h = v.sin()
    """, _A, kind="vec", classes=(6,))
add("whole_buffer", """
    buf = torch.zeros($B, $D)
    v = buf.view(-1)
    buf.copy_(self.a$k(h))
    h = v.view($B, $D)
    """, _A, kind="vec", classes=(6,))
add("buffer_of_steps", """
    buf = torch.zeros($B, $T, $D)
    for t in range($T):
        buf[:, t] = self.a$k(h[:, t])
    h = buf
    """, _A, kind="seq", classes=(6,))
add("buffer_of_samples", """
    buf = torch.zeros_like(h)
    for n in range($B):
        buf[n] = self.a$k(h[n])
    h = buf
    """, _A, classes=(6,))
add("views_of_samples", """
    buf = torch.zeros_like(h)
    v = buf[0]
    buf[0] = self.a$k(h[0])
    buf[1:] = h[1:]
    h = torch.cat([v[None], buf[1:]])
    """, _A, classes=(6,))
add("kept_buffer", """
    self.buf$k = torch.zeros_like(h)
    self.buf$k[..., 1:] = self.a$k(h)[..., 1:]
    h = h + self.buf$k
    """, lines(_A, "self.buf$k = None"), classes=(6,))
add("registered_buffer", """
    self.buf$k.copy_(h.detach())
    h = h * self.buf$k
    """, "self.register_buffer('buf$k', torch.zeros($B, $D))", kind="vec", classes=(6,))
add("buffer_view_written", """
    self.buf$k.view(-1)[:$D].add_(1)
    h = h * self.buf$k[0]
    """, "self.register_buffer('buf$k', torch.zeros(2, $D))", classes=(6,))
add("running_constant", """
    self.buf$k += 1
    h = h * self.buf$k
    """, "self.register_buffer('buf$k', torch.zeros($D))")
add("relu_in_place", "h = F.relu(h * 1.0, inplace=True)")
add("in_place", "h = h.clone().<<tanh_()|mul_(2)|add_(1)|sigmoid_()|clamp_(-1, 1)|exp_()>>")
add("in_place_weight", "h = (h * 1.0).<<mul_|add_|sub_>>(self.w$k)", "self.w$k = weight($D)")
add("in_place_of_self", """
    u = h * 1.0
    u += self.a$k(h)
    h = u
    """, _A)
add("addcmul", "h = h.clone().addcmul_(h, self.w$k, value=<<1|0.5>>)", "self.w$k = weight($D)")
add("masked_write", """
    h = h.clone()
    h[h > 0] = <<0.5|0>>
    """, classes=(6,))
add("masked_fill_in_place", "h = h.clone().masked_fill_(h > 0, 0.5)")
add("out_of_where", """
    h = h.clone()
    h[~mask] = 0
    """, kind="seq", classes=(6,))
add("step_swapped", """
    h = h.clone()
    h[:, 0], h[:, -1] = h[:, -1].clone(), h[:, 0].clone()
    """, kind="seq", classes=(6,))
add("carry", """
    c = torch.zeros($B, $D)
    out = []
    for t in range($T):
        c = (c + self.a$k(h[:, t])).tanh()
        out.append(c)
    h = torch.stack(out, 1)
    """, _A, kind="seq")
add("carry_in_place", """
    c = torch.zeros($B, $D)
    for t in range($T):
        c += self.a$k(h[:, t])
    h = c
    """, _A, kind="seq", to="vec", classes=(6,))
add("diagonal", """
    u = (h.unsqueeze(-1) * h.unsqueeze(-2)).clone()
    u.diagonal(dim1=-2, dim2=-1).zero_()
    h = u.sum(-1)
    """, classes=(6,))
add("as_strided", "h = h.contiguous().as_strided(h.shape, h.contiguous().stride())", rate=0.3)
add("unsqueezed_write", """
    u = h * 1.0
    u.unsqueeze(0)[0, ..., 0].zero_()
    h = u
    """, classes=(6,))
add("narrowed_write", """
    u = h * 1.0
    u.narrow(-1, 0, 1).mul_(self.w$k)
    h = u
    """, "self.w$k = weight(1)", classes=(6,))
add("detached_write", """
    u = h.clone()
    u.detach().<<zero_()|mul_(1)>>
    h = u + h.sin()
    """, rate=0.3, classes=(6,))
add("late_view_of_constant", """
    buf = torch.zeros(<<2, $D|$D>>)
    v = buf.view(-1)[-$D:]
    buf.<<add_|copy_>>(self.w$k)
    h = h * v
    """, "self.w$k = weight($D)", classes=(6,))
add("stale_second_weight", """
    w = self.w$k.clone()
    v = w[<<0|-1>>]
    w.<<mul_(2)|add_(self.w$k)>>
    h = h * <<(self.b$k + v)|torch.stack([self.b$k, v]).sum(0)>>
    """, "self.w$k = weight(2, $D); self.b$k = weight($D)", classes=(6,))
add("constant_changed_later", """
    c = torch.ones(1, $D)
    u = c <<* self.w$k|+ self.w$k>>
    c = c.<<mul(2)|clone().mul_(2)>>
    h = h * u + c
    """, "self.w$k = weight($D)", classes=(6,))

# Moved in place: shapes and strides change, elements do not.
add("transposed_in_place", """
    u = h * 1.0
    v = u[..., 0]
    u.<<t_()|transpose_(0, 1)|swapaxes_(0, 1)>>.mul_(2)
    h = u.T + v.unsqueeze(-1)
    """, kind="vec", classes=(6,))
add("unsqueezed_in_place", """
    u = h.clone()
    u.unsqueeze_(<<0|1|-1>>).<<squeeze_()|mul_(2).squeeze_()>>
    h = u.view_as(h)
    """, classes=(6,))
add("weight_transposed_in_place", """
    w = self.w$k * 1
    v = w<<[0]|[:, 0]>>
    w.<<t_()|transpose_(0, 1)|t_().mul_(2)|mul_(2).t_()>>
    h = h @ w + v
    """, "self.w$k = weight($D, $D)", classes=(6,))
add("weight_detached_in_place", """
    w = self.w$k * 1
    v = w[0]
    w.detach_()
    h = h @ w + v
    """, "self.w$k = weight($D, $D)", classes=(6,))
add("written_without_gradients", """
    u, w = h * 1.0, self.w$k * 1
    with torch.no_grad():
        <<u[..., 1:]|w[1:]|w[:, 1:]>>.mul_(2).<<add_(1)|clamp_(-1, 1)>>
    h = u @ w
    """, "self.w$k = weight($D, $D)", classes=(6,))
add("copied_in_another_order", """
    p = torch.randperm($B)
    u = <<torch.empty_like(h)|torch.zeros(h.shape)|h.detach() * 2>>
    u<<.copy_(h[p])|[:] = h[p]>>
    h = self.a$k(u)[p.argsort()]
    """, _A, classes=(4, 6))
add("data_in_another_order", """
    p, d = torch.randperm($B), h.detach()
    u = <<torch.empty_like(d)|torch.zeros(d.shape)|d * 2>>
    <<torch.sin(d[p], out=u)|torch.mul(d[p], 2, out=u[:])|u.view(-1).copy_(d[p].flatten())|u.data = d[p]>>
    h = h + self.a$k(u)[p.argsort()]
    """, _A, classes=(4, 6))
add("data_in_two_halves", """
    u = torch.zeros(*h.shape[:-1], 2 * $D)
    torch.sin(h.detach(), out=u[..., :$D])
    u[..., $D:]<<.copy_(h.detach())|.add_(h.detach())|[:] = h.detach()>>
    h = h + self.a$k(u)
    """, "self.a$k = nn.Linear(2 * $D, $D)", classes=(6,))
