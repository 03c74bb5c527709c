"""Indices: gathers, scatters and permutations, also of the batch and back."""

from fuzz.registry import add, lines

_A = "self.a$k = nn.Linear($D, $D)"
_P = "p = torch.randperm($B)"

# Inside of a sample.
add("gather", "h = h.gather(-1, h.argsort(-1))")
add("take_along", "h = torch.take_along_dim(h, h.argsort(-1, descending=True), -1)")
add("features_permuted", "h = h[..., torch.randperm($D)]")
add("features_repeated", "h = h[..., torch.randint($D, ($D,))]")
add("features_selected", "h = h.index_select(-1, torch.tensor([0] * $D))")
add("scatter", "h = torch.zeros_like(h).scatter(-1, h.argsort(-1), h)")
add("scatter_add", "h = torch.zeros_like(h).scatter_add(-1, torch.zeros_like(h).long(), h)")
add("index_add_features", "h = torch.zeros_like(h).index_add(-1, torch.randint($D, ($D,)), h)",
    classes=(4,))
add("index_copy_features", "h = torch.zeros_like(h).index_copy(-1, torch.randperm($D), h)")
add("boolean_features", "h = torch.cat([h[..., :1], h[..., torch.arange($D) > 0]], -1)")
add("steps_permuted", "h = h[:, torch.randperm($T)]", kind="seq")
add("step_of_sample", "h = h[torch.arange($B), ids[:, 0] % $T]", kind="seq", to="vec")
add("step_by_gather", "h = h.gather(1, (ids % $T)[..., None].expand_as(h))", kind="seq")
add("last_of_mask", "h = h[torch.arange($B), mask.sum(1) - 1]", kind="seq", to="vec")
add("boolean_steps", """
    u = torch.zeros_like(h)
    u[mask] = self.a$k(h[mask])
    h = u
    """, _A, kind="seq")
add("masked_scatter", "h = torch.zeros_like(h).masked_scatter(mask[..., None], h[mask])",
    kind="seq")
add("steps_added", "h = torch.zeros_like(h).index_add(1, torch.randint($T, ($T,)), h)", kind="seq",
    classes=(4,))
add("scatter_reduce", """
    i = (ids % $T)[..., None].expand_as(h)
    h = torch.zeros_like(h).scatter_reduce(1, i, h, '<<sum|mean|amax>>')
    """, kind="seq")
add("one_hot", "h = h + F.one_hot(ids[:, 0] % $D, $D).double() @ self.w$k", "self.w$k = weight($D, $D)",
    kind="vec")

# The batch permuted and back, or copied.
add("permuted_and_back", lines(_P, "h = self.a$k(h[p])[p.argsort()]"), _A, classes=(4,))
add("selected_and_back", lines(_P, "h = h.index_select(0, p).sin().index_select(0, p.argsort())"),
    classes=(4,))
add("copied_back", lines(_P, "h = torch.zeros_like(h).index_copy(0, p, self.a$k(h[p]))"), _A,
    classes=(4,))
add("added_back", lines(_P, "h = torch.zeros_like(h).index_add(0, p, self.a$k(h[p]))"), _A, classes=(4,))
add("put_back", lines(_P, "h = torch.zeros_like(h).index_put((p,), self.a$k(h[p]))"), _A, classes=(4,))
add("written_back", lines(_P, "u = torch.empty_like(h)", "u[p] = self.a$k(h[p])", "h = u"), _A,
    classes=(4, 6))
add("scattered_back",
    lines(_P, "h = torch.zeros_like(h).scatter(0, p[:, None].expand_as(h), self.a$k(h[p]))"), _A,
    kind="vec", classes=(4,))
add("flipped_and_back", "h = self.a$k(h.flip(0)).flip(0)", _A, classes=(4,))
add("rolled_and_back", "h = self.a$k(h.roll(1, 0)).roll(-1, 0)", _A, classes=(4,))
add("swapped_and_back", """
    p = torch.tensor([1, 0, *range(2, $B)])
    u = self.a$k(h[p])
    h = u.index_put((torch.tensor([0, 1]),), u[[1, 0]])
    """, _A, classes=(4,))
add("sorted_and_back", """
    p = mask.sum(1).argsort()
    h = self.a$k(h[p])[p.argsort()]
    """, _A, kind="seq", classes=(4,))
add("kept_order", "h = self.a$k(h[self.p$k])[self.p$k.argsort()]",
    lines(_A, "self.register_buffer('p$k', torch.arange($B))"), classes=(4, 8),
    between="model.p$k.copy_(torch.randperm($B))")
add("halves", "h = torch.cat([self.a$k(h[:1]), h[1:].sin()])", _A)
add("halves_by_index",
    "h = torch.cat([self.a$k(h[torch.arange($B) < 1]), h[torch.arange($B) >= 1]])", _A)
add("repeated", "h = self.a$k(h.repeat_interleave(2, 0))[::2]", _A)
add("tiled", "h = self.a$k(torch.cat([h, h.sin()]))[$B:]", _A)
add("two_views", """
    u, v = self.a$k(torch.cat([h, h.cos()])).chunk(2)
    h = u * v
    """, _A)
add("grouped",
    "h = self.a$k(h.unsqueeze(1).expand($B, 2, *h.shape[1:]).flatten(0, 1)).unflatten(0, ($B, 2)).sum(1)",
    _A)
add("experts", """
    r = torch.arange($B) % 2
    u = torch.zeros_like(h)
    for e in range(2):
        i = torch.where(r == e)[0]
        u = u.index_add(0, i, self.w$k[e] * h[i])
    h = u
    """, "self.w$k = weight(2, $D)", classes=(4,))
add("routed", """
    r = ids[:, 0] % 2
    u = torch.zeros_like(h)
    for e in range(2):
        i = torch.where(r == e)[0]
        u.index_add_(0, i, self.a$k[e](h[i]))
    h = u
    """, "self.a$k = nn.ModuleList(nn.Linear($D, $D) for _ in range(2))", kind="vec", classes=(4,))
add("rot90_of_features",
    "h = h + self.e$k(torch.rot90(ids.unsqueeze(-1).expand($B, $T, $T), <<1|2>>, (1, 2))).sum(2)",
    "self.e$k = nn.Embedding(5, $D)", kind="seq", classes=(4,))

# Written and added up by value: rows of a sample among themselves, or back after a shuffle.
add("shuffled_into_constant", """
    p = torch.randperm($B)
    out = torch.zeros(h.shape)
    out[p] = <<h[p]|self.a$k(h[p])>>
    h = out
    """, "self.a$k = nn.Linear($D, $D)", classes=(4,))
add("scattered_along_edges", """
    to = torch.arange($B).repeat_interleave(2)
    u = self.a$k(h)[to]
    at = to.view(-1, *[1] * (h.dim() - 1)).expand_as(u)
    h = torch.zeros_like(h).<<scatter_add(0, at, u)|scatter_reduce(0, at, u, "amax")|index_add(0, to, u)>>
    """, "self.a$k = nn.Linear($D, $D)", classes=(4,))
add("masked_into_constant", """
    keep = h.detach().flatten(1).sum(1) > 0
    out = torch.zeros(h.shape)
    out[keep] = self.a$k(h[keep])
    h = h + out
    """, "self.a$k = nn.Linear($D, $D)", classes=(4,))
add("diagonal_product", "h = torch.diag(torch.arange(1.0, $B + 1)) @ h", kind="vec", classes=(3, 4))
