"""Products, also with samples in the argument where others have a weight or a constant."""

from fuzz.registry import add, lines

_C = "self.register_buffer('c$k', torch.randn($D, $D))"
_A = "self.a$k = nn.Linear($D, $D)"

# A constant matrix over the features; with D == B it looks like one over the batch.
add("constant_matmul", "h = h @ self.c$k<<|.T>>", _C, classes=(3,))
add("constant_tensordot", "h = torch.tensordot(h, self.c$k, 1)", _C, classes=(3,))
add("constant_linear", "h = F.linear(h, self.c$k)", _C, classes=(3,))
add("constant_einsum", "h = torch.einsum('...i,ij->...j', h, self.c$k)", _C, classes=(3,))
add("constant_sparse", "h = torch.sparse.mm(self.c$k.to_sparse(), h.T).T", _C, kind="vec",
    classes=(3,))
add("constant_left", "h = (self.c$k @ h.unsqueeze(-1)).squeeze(-1)", _C, kind="vec", classes=(3,))
add("constant_tensordot_left", "h = torch.tensordot(self.c$k, h, ([1], [1])).T", _C, kind="vec",
    classes=(3,))
add("steps_matmul", "h = self.c$k @ h", "self.register_buffer('c$k', torch.randn($T, $T))",
    kind="seq", classes=(3,))
add("steps_tensordot", "h = torch.tensordot(h, self.c$k, ([1], [0])).transpose(1, 2)",
    "self.register_buffer('c$k', torch.randn($T, $T))", kind="seq", classes=(3,))

add("gram_of_sample", "h = (h @ h.mT) @ h", kind="seq")
add("bmm", "h = torch.bmm(torch.bmm(h, h.mT).softmax(-1), h)", kind="seq")
add("einsum_of_samples", "h = torch.einsum('btd,bsd->bts', h, h).softmax(-1) @ self.a$k(h)", _A,
    kind="seq")
add("products_of_samples", "h = torch.einsum('bi,bj->bij', h, self.a$k(h)).sum(<<1|2>>)", _A,
    kind="vec")
add("distances", "h = torch.cdist(h, h + 1) @ h", kind="seq")
add("cosine", "h = h * F.cosine_similarity(h, self.a$k(h), dim=-1).unsqueeze(-1)", _A)

# Samples in arguments that a handler may not look at.
add("bias_of_samples", "h = F.linear(self.c$k[:1].expand($B, $D), self.w$k, h)",
    lines(_C, "self.w$k = weight($D, $D)"), kind="vec", classes=(5,))
add("bias_of_samples_added", "h = torch.addmm(h, self.c$k[:1].expand($B, $D), self.w$k)",
    lines(_C, "self.w$k = weight($D, $D)"), kind="vec", classes=(5,))
add("samples_as_bias_vector", "h = F.linear(self.c$k, self.w$k, self.a$k(h).sum(1)).T * h",
    lines(_C, _A, "self.w$k = weight($B, $D)"), kind="vec", classes=(5,))
add("samples_as_weight", "h = F.linear(self.c$k, self.a$k(h)).T", lines(_C, _A), kind="vec",
    classes=(5,))
add("samples_as_kernels", """
    u = F.conv1d(self.c$k[:1, None], self.a$k(h)[:, None], padding=$D)
    h = u[0, :, :$D]
    """, lines(_C, _A), kind="vec", classes=(5,))
add("samples_as_kernels_2d", """
    u = F.conv2d(self.c$k[None, None], self.a$k(h)[:, None, None], padding=(0, $D))
    h = u[0, :, 0, :$D]
    """, lines(_C, _A), kind="vec", classes=(5,))
add("grouped_kernels", """
    k = self.a$k(h).view($B, 1, $D)
    h = F.conv1d(h.view(1, $B, $D), k, padding=$D, groups=$B)[0, :, :$D]
    """, _A, kind="vec", classes=(5,))
add("samples_in_grid", """
    g = self.a$k(h)[:, None, :, None].tanh().expand($B, 1, $D, 2)
    h = F.grid_sample(self.c$k[None, None].expand($B, 1, $D, $D), g, align_corners=False)[:, 0, 0]
    """, lines(_C, _A), kind="vec", classes=(5,))
add("samples_in_one_grid", """
    g = self.a$k(h)[None, :, :, None].tanh().expand(1, $B, $D, 2)
    h = F.grid_sample(self.c$k[None, None], g, align_corners=False)[0, 0]
    """, lines(_C, _A), kind="vec", classes=(5,))
add("samples_in_images", """
    g = torch.rand($B, 1, $D, 2) * 2 - 1
    h = F.grid_sample(self.a$k(h)[:, None, None], g, align_corners=False)[:, 0, 0]
    """, _A, kind="vec", classes=(5,))
add("mask_of_weights", """
    u = h.unsqueeze(1).expand($B, $B, $T, $D)
    h = F.scaled_dot_product_attention(u, u, u, attn_mask=self.m$k).sum(1)
    """, "self.m$k = weight($B, $T, $T)", kind="seq", classes=(5,))
add("mask_of_weights_for_steps", "h = F.scaled_dot_product_attention(h, h, h, attn_mask=self.m$k)",
    "self.m$k = weight($T, $T)", kind="seq", classes=(5,))
add("mask_of_samples", """
    m = self.a$k(h).sum(-1)[:, None].expand($B, $T, $T)
    h = F.scaled_dot_product_attention(h, h, h, attn_mask=m)
    """, _A, kind="seq", classes=(5,))
add("samples_as_values", """
    u = self.m$k.expand($B, $T, $D)
    h = F.scaled_dot_product_attention(u, u, h)
    """, "self.m$k = weight($T, $D)", kind="seq", classes=(5,))
add("samples_as_table", "h = F.embedding(torch.arange($B), self.a$k(h))", _A, kind="vec",
    classes=(5,))
add("samples_as_norm", "h = F.layer_norm(self.c$k[:1].expand($B, $D), ($D,)) * self.a$k(h)",
    lines(_C, _A), kind="vec", classes=(5,))
add("samples_as_slopes", """
    u = self.c$k[:1].expand($B, $D).T
    h = F.prelu(u, self.a$k(h).sum(1)).T * h
    """, lines(_C, _A), kind="vec", classes=(5,))
add("samples_as_bag_weights", """
    s = self.a$k(h)[:, :1].expand($B, $T).contiguous()
    h = F.embedding_bag(ids, self.w$k, per_sample_weights=s, mode='sum')
    """, lines(_A, "self.w$k = weight(5, $D)"), kind="vec", classes=(5,))
add("samples_as_rates", "h = torch.lerp(torch.zeros_like(h), torch.ones_like(h), self.a$k(h))", _A,
    classes=(5,))
add("samples_as_bilinear", "h = F.bilinear(self.c$k[:1].expand($B, $D), h, self.w$k)",
    lines(_C, "self.w$k = weight($D, $D, $D)"), kind="vec", classes=(5,))
add("samples_as_input", "h = torch.baddbmm(self.a$k(h), self.w$k.expand($B, $T, $T), h)",
    lines(_A, "self.w$k = weight($T, $T)"), kind="seq", classes=(5,))
add("solved", "h = torch.linalg.solve(torch.eye($D) * 9 + self.w$k, h.unsqueeze(-1)).squeeze(-1)",
    "self.w$k = weight($D, $D)", kind="vec", rate=0.3)
