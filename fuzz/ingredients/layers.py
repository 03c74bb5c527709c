"""Layers: the ordinary uses of parameters, drawn often."""

from fuzz.registry import add, lines

_W = "self.w$k = weight($D, $D)"

add("linear", "h = self.a$k(h)", "self.a$k = nn.Linear($D, $D<<|, bias=False>>)", layer=True,
    rate=4)
add("matmul", "h = torch.matmul(h, self.w$k<<|.T|.mT>>)", _W, layer=True)
add("at", "h = h @ self.w$k<<|.t()>>", _W, layer=True)
add("einsum", "h = torch.einsum('...d,de->...e', h, self.w$k)", _W, layer=True)
add("tensordot", "h = torch.tensordot(h, self.w$k, 1)", _W, layer=True)
add("scale", "h = h * self.w$k", "self.w$k = weight($D)", layer=True)
add("shift", "h = h + self.w$k", "self.w$k = weight(<<$D|1>>)", layer=True)
add("layer_norm", "h = self.a$k(h)", "self.a$k = nn.<<LayerNorm|RMSNorm>>($D)", layer=True)
add("prelu", "h = F.prelu(h.flatten(1), self.w$k).view_as(h)", "self.w$k = weight(1)", layer=True)
add("mlp", "h = self.a$k(h)",
    "self.a$k = nn.Sequential(nn.Linear($D, 5), nn.<<Tanh|GELU|ReLU>>(), nn.Linear(5, $D))",
    layer=True, rate=2)
add("addmm", "h = torch.addmm(self.b$k, h, self.w$k)", lines(_W, "self.b$k = weight($D)"),
    kind="vec", layer=True)
add("bilinear", "h = self.a$k(h, h)", "self.a$k = nn.Bilinear($D, $D, $D)", kind="vec", layer=True)
add("batch_norm_eval", "h = self.a$k(h)", "self.a$k = nn.BatchNorm1d($D).eval()", kind="vec",
    layer=True, rate=0.5)
add("embedding", "h = h + self.e$k(ids[:, <<0|-1>>])", "self.e$k = nn.Embedding(5, $D)", kind="vec",
    layer=True)
add("embedding_bag", "h = h + F.embedding_bag(ids, self.w$k, mode='<<sum|mean>>')",
    "self.w$k = weight(5, $D)", kind="vec", layer=True)
add("lookup", "h = h + self.w$k[ids[:, 0]]", "self.w$k = weight(5, $D)", kind="vec", layer=True)
add("embeddings", "h = h + self.e$k(ids)", "self.e$k = nn.Embedding(5, $D)", kind="seq", layer=True)
add("lookups", "h = h + self.w$k[ids]", "self.w$k = weight(5, $D)", kind="seq", layer=True)
add("conv1d", "h = self.a$k(h)",
    "self.a$k = nn.Conv1d($T, $T, <<1|3, padding=1|3, padding=1, groups=$T>>)", kind="seq",
    layer=True)
add("group_norm", "h = self.a$k(h)", "self.a$k = nn.GroupNorm(1, $T)", kind="seq", layer=True)
add("recurrent", "h, _ = self.a$k(h)", "self.a$k = nn.<<GRU|LSTM|RNN>>($D, $D, batch_first=True)",
    kind="seq", layer=True, rate=0.3)
add("attention_layer", "h, _ = self.a$k(h, h, h<<|, need_weights=False|, key_padding_mask=~mask>>)",
    "self.a$k = nn.MultiheadAttention($D, 1, batch_first=True)", kind="seq", layer=True, rate=0.4)
add("encoder_layer", "h = self.a$k(h)",
    "self.a$k = nn.TransformerEncoderLayer($D, 1, 5, dropout=0.0, batch_first=True)", kind="seq",
    layer=True, rate=0.2)
add("attention", """
    q, k, v = self.a$k(h).chunk(3, -1)
    h = F.scaled_dot_product_attention(q, k, v<<|, is_causal=True|, attn_mask=mask[:, None]>>)
    """, "self.a$k = nn.Linear($D, 3 * $D)", kind="seq", layer=True)
add("attention_by_hand", """
    q, k, v = self.a$k(h).chunk(3, -1)
    s = (q @ k.mT).masked_fill(~mask[:, None], -1e9)
    h = s.softmax(-1) @ v
    """, "self.a$k = nn.Linear($D, 3 * $D)", kind="seq", layer=True)
add("conv2d", "h = self.a$k(h)",
    "self.a$k = nn.Conv2d($T, $T, <<1|3, padding=1|3, padding=1, groups=$T>>)", kind="img",
    layer=True)
add("conv_transpose", "h = self.a$k(h)", "self.a$k = nn.ConvTranspose2d($T, $T, 3, padding=1)",
    kind="img", layer=True)
add("group_norm_2d", "h = self.a$k(h)",
    "self.a$k = nn.<<GroupNorm(1, $T)|InstanceNorm2d($T, affine=True)>>", kind="img", layer=True)
