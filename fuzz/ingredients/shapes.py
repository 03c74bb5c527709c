"""Elementwise functions, changes of shape inside of a sample, and steps from one kind of shape to another."""

from fuzz.registry import add

add("activation", "h = torch.<<tanh|sin|sigmoid|relu|erf>>(h)", rate=2)
add("functional", "h = F.<<gelu|silu|softplus|elu|mish|leaky_relu|hardtanh>>(h)", rate=2)
add("softmax", "h = h.<<softmax|log_softmax>>(-1)")
add("normalize", "h = F.normalize(h, dim=-1)")
add("dropout", "h = F.dropout(h, 0.5)")
add("clamp", "h = h.clamp(<<-1, 1|min=0>>)")
add("cumsum", "h = h.<<cumsum|cumprod|logcumsumexp>>(-1)")
add("sort", "h = h.sort(-1)[0]")
add("topk", "h = h.topk($D, dim=-1)[0]")
add("flip", "h = h.flip(-1)")
add("roll", "h = h.roll(1, -1)")
add("mean_kept", "h = h - h.mean(-1, keepdim=True)")
add("standardised", "h = (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1)")
add("chunks", """
    u, v = torch.cat([h, h.sin()], -1).chunk(2, -1)
    h = u * v
    """)
add("split_and_cat", "h = torch.cat(h.split(1, -1)[::-1], -1)")
add("stack_and_sum", "h = torch.stack([h, h.cos()], <<0|1|-1>>).sum(<<0|1|-1>>)")
add("unbind", "h = torch.stack([u.tanh() for u in h.unbind(-1)], -1)")
add("pad", "h = F.pad(h, (1, 0))[..., :$D]")
add("where", "h = torch.where(h > 0, h, h.sin())")
add("outer", "h = (h.unsqueeze(-1) * h.unsqueeze(-2)).sum(<<-1|-2>>)")
add("flatten_and_back", "h = h.flatten().view($B, -1).view_as(h)")
add("transposed_and_back", "h = h.transpose(0, -1).contiguous().tanh().transpose(0, -1)")
add("merged", "h = h.reshape(-1, $D).softmax(1).view_as(h)")
add("detached", "h = h + h.detach().sin()")
add("complex", "h = torch.view_as_real(torch.complex(h, h.sin()) * (1 + 2j)).sum(-1)")
add("fft", "h = torch.fft.fft(h, dim=-1).<<real|imag>>")
add("left_behind", """
    self.last$k = h
    h = h.tanh()
    """, "self.last$k = None")
add("printed", """
    self.seen$k.append(tuple(h.shape))
    h = h.sin()
    """, "self.seen$k = []")
add("counted", """
    self.count$k += 1
    h = h / 2
    """, "self.register_buffer('count$k', torch.zeros(()))")
add("masked_steps", "h = h * mask.unsqueeze(-1)", kind="seq")
add("masked_fill", "h = h.masked_fill(~mask.unsqueeze(-1), 0.5)", kind="seq")
add("swap_axes", "h = h.transpose(1, 2).reshape(h.shape)", kind="seq")
add("pool", "h = F.<<max|avg>>_pool1d(h, 3, 1, 1)", kind="seq")
add("unfold", "h = F.pad(h, (0, 0, 1, 1)).unfold(1, 3, 1).sum(-1)", kind="seq")
add("pool_2d", "h = F.<<max|avg>>_pool2d(h, 3, 1, 1)", kind="img")
add("pixels", "h = F.interpolate(h, scale_factor=2)[..., ::2, ::2]", kind="img")

add("to_seq", "h = h.unsqueeze(1) * self.w$k", "self.w$k = weight($T, $D)", kind="vec", to="seq")
add("to_seq_expanded", "h = h.unsqueeze(1).expand($B, $T, $D)", kind="vec", to="seq")
add("to_vec", "h = h.<<mean(1)|sum(1)|amax(1)>>", kind="seq", to="vec")
add("last_step", "h = h[:, <<-1|0>>]", kind="seq", to="vec")
add("head", "h = self.a$k(h.flatten(1))", "self.a$k = nn.Linear($T * $D, $D)", kind="seq", to="vec")
add("masked_mean", """
    m = mask.unsqueeze(-1)
    h = (h * m).sum(1) / m.sum(1)
    """, kind="seq", to="vec")
add("to_img", "h = h.unsqueeze(-1) * self.w$k", "self.w$k = weight($D)", kind="seq", to="img",
    rate=0.5)
add("to_seq_pooled", "h = h.<<mean(-1)|amax(2)|flatten(2)[..., :$D]>>", kind="img", to="seq")
