"""Functions that mix the samples of a batch; a program of the second family has exactly one."""

from functools import partial

from fuzz.registry import add, lines

mix = partial(add, mixes=True)
_C = "self.register_buffer('c$k', torch.randn($B, $B))"
_A = "self.a$k = nn.Linear($D, $D)"

# Statistics of the batch.
mix("batch_mean", "h = h - h.mean(0<<|, keepdim=True>>)")
mix("batch_sum", "h = h * h.sum(0).<<tanh()|sin()>>")
mix("batch_max", "h = h - h.<<amax|amin|logsumexp>>(0)")
mix("batch_softmax", "h = h.<<softmax|log_softmax>>(0)")
mix("batch_functional_softmax", "h = F.<<softmax|normalize>>(h, dim=0)")
mix("batch_statistics", "h = (h - h.mean(0)) / (h.var(0) + 1).sqrt()")
mix("batch_norm", "h = self.a$k(h)", "self.a$k = nn.BatchNorm1d($D)", kind="vec", classes=(14,))
mix("batch_norm_functional", "h = F.batch_norm(h, None, None, training=True)", kind="vec")
mix("total", "h = h * h.<<mean()|sum().tanh()|std()|norm()>>")
mix("total_of_layer", "h = h * self.a$k(h).mean()", _A)
mix("median", "h = h - h.median(0)[0]")
mix("flat_softmax", "h = h.flatten().softmax(0).view_as(h)")
mix("moved_beside_data", "h = torch.einsum('bi,bi->bi', h.<<flip(0)|roll(1, 0)>>, h.detach())",
    kind="vec", classes=(4, 5))
mix("weight_beside_moved_data", "h = F.bilinear(h, h.detach().<<flip(0)|roll(1, 0)>>, self.w$k)",
    "self.w$k = weight($D, $D, $D)", kind="vec", classes=(5,))
mix("weight_beside_data", "h = F.bilinear(h.<<flip(0)|roll(1, 0)>>, h.detach(), self.w$k)",
    "self.w$k = weight($D, $D, $D)", kind="vec", classes=(5,))
mix("flat_roll", "h = h.flatten().roll(1).view_as(h)")
mix("detached_mean", "h = h + h.detach().mean(0)")
mix("running_mean", """
    self.m$k = 0.9 * self.m$k + 0.1 * h.detach().mean(0)
    h = h - self.m$k
    """, "self.register_buffer('m$k', torch.zeros($D))", kind="vec")
mix("global_scale", "h = h / (1 + h.abs().max())")
mix("renorm", "h = h.renorm(2, -1, 0.5)")

# Orders, shifts and copies of rows.
mix("batch_sort", "h = h.sort(0)[0]")
mix("batch_argsort", "h = h[h.flatten(1).sum(1).argsort()]", classes=(4,))
mix("batch_roll", "h = h.roll(1, 0)", classes=(4,))
mix("batch_roll_added", "h = h + h.roll(<<1|-1>>, 0)", classes=(4,))
mix("batch_flip", "h = h.flip(0)", classes=(4,))
mix("batch_cumsum", "h = h.<<cumsum|cumprod|logcumsumexp>>(0)")
mix("batch_cummax", "h = h.cummax(0)[0]")
mix("batch_diff", "h = torch.cat([h[:1], h.diff(dim=0)])")
mix("shifted", "h = torch.cat([h[1:], h[:1]])", classes=(4,))
mix("first_row", "h = h + h[0]", classes=(4, 8))
mix("last_row", "h = h * h[-1:]", classes=(4, 8))
mix("row_by_integer", "h = torch.stack([h[n - 1] for n in range($B)])", classes=(4, 8))
mix("row_by_slice", "h = torch.cat([h[-1:], h[:-1]])", classes=(4,))
mix("permuted", "h = h[torch.randperm($B).roll(1)]", classes=(4,))
mix("permuted_by_buffer", "h = h[self.p$k]", "self.register_buffer('p$k', torch.arange($B))",
    classes=(4, 8), between="model.p$k.copy_(torch.randperm($B).roll(1))")
mix("wrong_way_back", """
    p = torch.arange($B).roll(1)
    h = self.a$k(h[p])[p]
    """, _A, classes=(4,))
mix("wrong_copy_back", """
    p = torch.arange($B)
    h = torch.zeros_like(h).index_copy(0, p.flip(0), self.a$k(h[p]))
    """, _A, classes=(4,))
mix("index_selected", "h = h.index_select(0, torch.randint($B, ($B,)))", classes=(4,))
mix("gathered", "h = h.gather(0, h.argsort(0))", classes=(4,))
mix("taken", "h = torch.take(h, torch.randperm($B * $D)).view($B, $D)", kind="vec", classes=(4,))
mix("looked_up", "h = F.embedding(torch.arange($B).flip(0), h)", kind="vec", classes=(4, 5))
mix("index_added",
    "h = h + torch.zeros_like(h).index_add(0, torch.zeros($B, dtype=torch.long), self.a$k(h))", _A,
    classes=(4,))
mix("index_added_twice", """
    i = torch.arange($B) // 2
    h = h * torch.zeros_like(h).index_add(0, i, self.a$k(h))[i]
    """, _A, classes=(4,))
mix("index_added_in_place", """
    u = torch.zeros_like(h)
    u.index_add_(0, torch.arange($B) // 2, h)
    h = u[torch.arange($B) // 2]
    """, classes=(4,))
mix("accumulated",
    "h = h.index_put((torch.zeros($B, dtype=torch.long),), self.a$k(h), accumulate=True)", _A,
    classes=(4,))
mix("swapped", "h = h.index_put((torch.tensor([0, 1]),), h[[1, 0]])", classes=(4,))
mix("swapped_in_place", """
    h = h.clone()
    h[[0, 1]] = h[[1, 0]]
    """, classes=(4, 6))
mix("scattered", """
    i = torch.arange($B).flip(0)[:, None].expand_as(h)
    h = torch.zeros_like(h).scatter(0, i, h)
    """, kind="vec", classes=(4,))
mix("scatter_added", """
    i = torch.zeros($B, $D, dtype=torch.long)
    h = torch.zeros_like(h).scatter_add(0, i, h) + h
    """, kind="vec", classes=(4,))
mix("ids_rotated", "h = h + self.e$k(torch.rot90(ids, <<1|3>>, (0, 1)))",
    "self.e$k = nn.Embedding(5, $D)", kind="seq", classes=(4,), only_if="B == T")
mix("rotated", "h = torch.rot90(h, 1, (0, 1))", kind="vec", classes=(4,), only_if="B == D")
mix("ids_transposed", "h = h + self.e$k(ids.T)", "self.e$k = nn.Embedding(5, $D)", kind="seq",
    classes=(4,), only_if="B == T")
mix("ids_of_first", "h = h + self.e$k(ids[0, 0])", "self.e$k = nn.Embedding(5, $D)", kind="vec",
    classes=(4, 8))
mix("ids_rolled", "h = h + self.e$k(ids.<<roll(1, 0)|flip(0)>>)", "self.e$k = nn.Embedding(5, $D)",
    kind="seq", classes=(4,))
mix("transposed", "h = h + h.T", kind="vec", only_if="B == D")
mix("reshaped", "h = h.T.reshape($B, $D)", kind="vec")
mix("loop_with_carry", """
    c = torch.zeros_like(h[0])
    out = []
    for row in h:
        c = c + self.a$k(row)
        out.append(c)
    h = torch.stack(out)
    """, _A)

# Products over the batch.
mix("matrix", "h = (self.c$k @ h.flatten(1)).view_as(h)", _C, classes=(3,))
mix("matrix_tensordot", "h = torch.tensordot(self.c$k, h, 1)", _C, classes=(3,))
mix("matrix_tensordot_dims", "h = torch.tensordot(self.c$k, h, ([<<0|1>>], [0]))", _C, classes=(3,))
mix("matrix_einsum", "h = torch.einsum('ab,b...->a...', self.c$k, h)", _C, classes=(3,))
mix("matrix_sparse", "h = <<torch.sparse.mm(self.c$k.to_sparse(), h)|self.c$k.to_sparse() @ h>>",
    _C, kind="vec", classes=(3,))
mix("matrix_linear", "h = F.linear(h.T, self.c$k).T", _C, kind="vec", classes=(3,))
mix("matrix_right", "h = (h.T @ self.c$k).T", _C, kind="vec", classes=(3,))
mix("matrix_addmm", "h = torch.addmm(h, self.c$k, self.a$k(h))", lines(_C, _A), kind="vec",
    classes=(3,))
mix("matrix_mv", "h = h * torch.mv(self.c$k, h[:, 0])[:, None]", _C, kind="vec", classes=(3,))
mix("matrix_weight", "h = self.w$k @ h", "self.w$k = weight($B, $B)", kind="vec", classes=(3,))
mix("matrix_solve", "h = torch.linalg.solve(self.c$k + 9 * torch.eye($B), h)", _C, kind="vec",
    classes=(3,))
mix("matrix_conv", "h = F.conv1d(h.T[None], self.a$k, padding=1)[0].T",
    "self.a$k = weight($D, $D, 3)", kind="vec", classes=(5,))
mix("matrix_inner", "h = torch.inner(h.T, self.c$k).T", _C, kind="vec", classes=(3,))
mix("matrix_chain", "h = torch.linalg.multi_dot([self.c$k, self.c$k, h])", _C, kind="vec",
    classes=(3,))
mix("gram",
    "h = <<h @ h.T|torch.mm(h, h.t())|torch.einsum('bd,cd->bc', h, h)|torch.cdist(h, h + 1)>> @ h",
    kind="vec", classes=(3,))
mix("covariance", "h = h @ (h.T @ h)", kind="vec", classes=(3,))
mix("covariance_tensordot", "h = h @ torch.tensordot(h, h, ([0], [0]))", kind="vec", classes=(3,))
mix("attention_over_batch", """
    u = h.unsqueeze(0)
    h = F.scaled_dot_product_attention(u, u, u)[0]
    """, kind="vec", classes=(5,))
mix("attention_layer_over_batch", "h, _ = self.a$k(h, h, h)",
    "self.a$k = nn.MultiheadAttention($D, 1)", kind="seq", rate=0.5)
mix("recurrent_over_batch", "h, _ = self.a$k(h)", "self.a$k = nn.GRU($D, $D)", kind="seq", rate=0.5)
mix("grid_of_all",
    "h = F.grid_sample(h[None, None], torch.rand(1, $B, $D, 2), align_corners=False)[0, 0]",
    kind="vec", classes=(5,))
mix("kernel_of_all", "h = F.conv1d(h[:, None], h[:, None], padding=$D)[:, 0, :$D]", kind="vec",
    classes=(5,))
mix("pool_over_batch", "h = F.avg_pool1d(h.T[None], 3, 1, 1)[0].T", kind="vec")
mix("fft_over_batch", "h = torch.fft.fft(h, dim=0).real")
mix("unfolded", "h = F.pad(h.T, (1, 1)).unfold(1, 3, 1).sum(-1).T", kind="vec")
mix("outer_over_batch", "h = h + torch.outer(h[:, 0], h[:, 0]) @ h", kind="vec", classes=(3,))

# Out of sight.
mix("function_mean", "h = <<Centre|NumpyCentre|Neighbour>>.apply(h)", classes=(2,), rate=3)
mix("scripted_mean", "h = scripted_centre(h)", classes=(1, 2))
mix("vmapped_mean", "h = torch.vmap(centred, in_dims=-1, out_dims=-1)(h)", classes=(1, 2))
mix("vmapped_roll", "h = torch.vmap(lambda u: u.roll(1, 0), in_dims=-1, out_dims=-1)(h)",
    classes=(1, 2))
mix("namesake_mean", "h = <<gelu|softplus>>(h)", classes=(7,), rate=3)
mix("compiled_mean", "h = compiled_centre(h)", classes=(12,), rate=0.03)
mix("checkpointed_mean", "h = checkpoint(centred, h, use_reentrant=False)", rate=0.5)
mix("numpy_mean", "h = h - torch.from_numpy(h.detach().numpy().mean(0))", rate=0.5)
mix("listed_mean", "h = h + torch.tensor(h.detach().sum(0).tolist())", rate=0.5)
mix("item_of_batch", "h = h * h.detach().sum().item()", rate=0.5)
mix("gradient_of_batch", """
    u = h.detach().requires_grad_()
    (g,) = torch.autograd.grad(u.sum(0).sin().sum(), u)
    h = h * g
    """, rate=0.3)

# Writes.
mix("row_added", """
    h = h.clone()
    h[0] += h[1]
    """, classes=(6,))
mix("rows_shifted", """
    u = h.clone()
    u[1:] = h[:-1]
    h = u
    """, classes=(6,))
mix("view_of_row", """
    u = h * 1.0
    v = u[0]
    u[1] = v * 2
    h = u
    """, classes=(6,))
mix("flat_write", """
    u = h * 1.0
    u.view(-1)[0] = u.view(-1)[-1]
    h = u
    """, classes=(6,))
mix("transposed_write", """
    u = h * 1.0
    u.transpose(0, -1).sub_(u.mean(0).detach().unsqueeze(-1))
    h = u
    """, kind="vec", classes=(6,))
mix("left_from_row", """
    self.first$k = h[0]
    h = h - self.first$k
    """, "self.first$k = None", classes=(6, 8))
mix("stale_row", """
    buf = torch.zeros_like(h)
    v = buf[0]
    buf.copy_(self.a$k(h))
    h = h + v
    """, _A, classes=(6,))
mix("stacked_rows", """
    buf = torch.zeros_like(h)
    for n in range($B):
        buf[n] = self.a$k(h[n - 1])
    h = buf
    """, _A, classes=(6, 8))

# By value.
mix("edge_between_samples", """
    to = torch.arange($B).roll(1)
    h = h + torch.zeros_like(h).<<index_add(0, to, h)|index_copy(0, to, h)>>
    """, classes=(4,))
mix("row_of_another_written", """
    out = h.clone()
    out[0] = h[$B - 1] + h[0]
    h = out
    """, classes=(4, 6))
mix("vmapped_over_keys", """
    u = h
    h = h + torch.vmap(lambda row: (u @ row).softmax(0) @ u)(h)
    """, kind="vec", classes=(1, 2))

# A constant whose values keep the samples apart in the first batch, and not in the second.
mix("changing_constant", """
    c, u = self.c$k, h.flatten(1)
    u = <<torch.linalg.solve(c, u)|torch.linalg.multi_dot([c, u])|torch.inner(u.T, c).T>>
    h = u.view_as(h)
    """, "self.register_buffer('c$k', torch.eye($B) * 2)", classes=(3, 8),
    between="model.c$k.add_(1)")
