"""Five more families, labelled before a first look at what the matcher says of them.

At that first look 54 of 58 were right, 57 since a modulation may read a vector of another width
than the model's.

The figures are terse: few sizes, and a kind only where the words of the label do not say it.
"""

FLUX = """
embedding of the timestep: time = time_text_embed.timestep_embedder
pooled text: mlp = time_text_embed.text_embedder
linear of the image latent: linear, 16 -> d = x_embedder
linear of the text: linear, 20 -> d = context_embedder
double stream block x N = transformer_blocks.0
  modulation of the image = transformer_blocks.0.norm1 | transformer_blocks.0.norm1.linear
  joint attention = transformer_blocks.0.attn
  mlp of the image = transformer_blocks.0.ff
  mlp of the text = transformer_blocks.0.ff_context
single stream block x M = single_transformer_blocks.0
  modulation = single_transformer_blocks.0.norm | single_transformer_blocks.0.norm.linear
  attention = single_transformer_blocks.0.attn
last modulation = norm_out | norm_out.linear
output: head = proj_out
"""

COGVIDEOX = """
patchify the latent = patch_embed.proj
linear of the text = patch_embed.text_proj
timestep embedding = time_embedding
expert transformer block: block x N = transformer_blocks.0
  expert adaptive layernorm: modulation = \
transformer_blocks.0.norm1 | transformer_blocks.0.norm1.linear
  3D full attention = transformer_blocks.0.attn1
  second expert adaptive layernorm: modulation = \
transformer_blocks.0.norm2 | transformer_blocks.0.norm2.linear
  feed forward = transformer_blocks.0.ff
final norm = norm_final
modulation of the output = norm_out | norm_out.linear
linear and unpatchify: head = proj_out
"""

CONVNEXT = """
stem: patch = convnext.embeddings.patch_embeddings
first stage: stage = convnext.encoder.stages.0
  block x 2 = convnext.encoder.stages.0.layers.0
    7x7 depthwise conv = convnext.encoder.stages.0.layers.0.dwconv
    norm = convnext.encoder.stages.0.layers.0.layernorm
    1x1 up: linear = convnext.encoder.stages.0.layers.0.pwconv1
    1x1 down: linear = convnext.encoder.stages.0.layers.0.pwconv2
second stage: stage = convnext.encoder.stages.1
  downsampling: conv = convnext.encoder.stages.1.downsampling_layer.1
last norm = convnext.layernorm
classifier = classifier
"""

NEOX = """
token embedding = gpt_neox.embed_in
rotary positions = gpt_neox.rotary_emb
parallel block x N = gpt_neox.layers.0
  norm before attention: norm = gpt_neox.layers.0.input_layernorm
  attention = gpt_neox.layers.0.attention
    projection to q, k and v: linear = gpt_neox.layers.0.attention.query_key_value
  norm before the MLP: norm = gpt_neox.layers.0.post_attention_layernorm
  feed forward = gpt_neox.layers.0.mlp
last norm = gpt_neox.final_layer_norm
logits = lm_head
"""

PIXART = """
patchify = pos_embed | pos_embed.proj
timestep embedding = adaln_single.emb.timestep_embedder | adaln_single.emb
adaLN-single for all blocks: modulation = adaln_single.linear | adaln_single
projection of the caption: mlp = caption_projection
dit block x N = transformer_blocks.0
  layer norm: norm = transformer_blocks.0.norm1
  self-attention = transformer_blocks.0.attn1
  cross-attention = transformer_blocks.0.attn2
  second norm = transformer_blocks.0.norm2
  pointwise feedforward = transformer_blocks.0.ff
final norm = norm_out
linear and reshape: head = proj_out
"""

FIGURES = {
    "flux": FLUX,
    "cogvideox": COGVIDEOX,
    "convnext": CONVNEXT,
    "neox": NEOX,
    "pixart": PIXART,
}
