"""Ten models the matcher was developed with."""

BART = """
input embedding: embedding, vocab -> d = model.shared | model.encoder.embed_tokens
encoder: stack = model.encoder
  positional encoding: position = model.encoder.embed_positions
  encoder layer: block x N = model.encoder.layers.0
    multi-head attention: attention = model.encoder.layers.0.self_attn
    add & norm: norm = model.encoder.layers.0.self_attn_layer_norm
    feed forward: mlp, d -> 80 -> d = model.encoder.layers.0.fc1
decoder: stack = model.decoder
  decoder layer: block x N = model.decoder.layers.0
    masked multi-head attention: attention = model.decoder.layers.0.self_attn
    encoder-decoder attention: cross-attention = model.decoder.layers.0.encoder_attn
linear and softmax: head, d -> vocab = lm_head
"""

VIT = """
linear projection of flattened patches: patch = \
vit.embeddings.patch_embeddings | vit.embeddings.patch_embeddings.projection
position embedding and class token: position = vit.embeddings
transformer encoder: block x L = vit.layers.0
  norm before attention: norm = vit.layers.0.layernorm_before
  multi-head attention: attention, d -> d = vit.layers.0.attention
  norm before the mlp: norm = vit.layers.0.layernorm_after
  mlp: mlp = vit.layers.0.mlp
last norm: norm = vit.layernorm
mlp head: head, d -> classes = classifier
"""

MIXTRAL = """
token embedding: embedding = model.embed_tokens
rotary embedding: rotary = model.rotary_emb
layer: block x 2 = model.layers.0
  attention norm: norm = model.layers.0.input_layernorm
  grouped-query attention: attention = model.layers.0.self_attn
  feed-forward norm: norm = model.layers.0.post_attention_layernorm
  mixture of experts: moe = model.layers.0.mlp
    gating network: router, d -> 5 = model.layers.0.mlp.gate
    experts: experts x 5 = model.layers.0.mlp.experts
final norm: norm = model.norm
output: head, d -> vocab = lm_head
"""

MAMBA = """
embedding: embedding, vocab -> d = backbone.embeddings
residual block: block x N = backbone.layers.0
  norm: norm = backbone.layers.0.norm
  mamba mixer: ssm = backbone.layers.0.mixer
    projection to x and z: linear, d -> 128 = backbone.layers.0.mixer.in_proj
    conv: conv = backbone.layers.0.mixer.conv1d
    selection (B, C and delta): linear = backbone.layers.0.mixer.x_proj
    step size: linear, 2 -> 64 = backbone.layers.0.mixer.dt_proj
    output projection: linear, 64 -> d = backbone.layers.0.mixer.out_proj
norm of the output: norm = backbone.norm_f
language modelling head: head = lm_head
"""

WHISPER = """
audio encoder: stack = model.encoder
  2 x conv1d + gelu: conv = model.encoder.conv1
  second convolution: conv, d -> d = model.encoder.conv2
  sinusoidal positional encoding: position = model.encoder.embed_positions
  encoder block: block x N = model.encoder.layers.0
    self attention: attention = model.encoder.layers.0.self_attn
    mlp: mlp = model.encoder.layers.0.fc1
text decoder: stack = model.decoder
  token embedding: embedding = model.decoder.embed_tokens
  learned positional encoding: position = model.decoder.embed_positions
  decoder block: block x N = model.decoder.layers.0
    cross attention: cross-attention = model.decoder.layers.0.encoder_attn
next-token prediction: head = proj_out
"""

CLIP = """
text encoder: stack = text_model
  token embedding: embedding = text_model.embeddings.token_embedding
  block of the text encoder: block x 2 = text_model.encoder.layers.0
    masked self-attention: attention = text_model.encoder.layers.0.self_attn
  last layer norm: norm = text_model.final_layer_norm
image encoder: stack = vision_model
  patch embedding: patch = vision_model.embeddings.patch_embedding
  extra layer norm: norm = vision_model.pre_layrnorm
  block of the image encoder: block x 2 = vision_model.encoder.layers.0
    mlp: mlp, w -> 60 -> w = vision_model.encoder.layers.0.mlp
projection of the image: linear, w -> 20 = visual_projection
projection of the text: linear, d -> 20 = text_projection
"""

LLAVA = """
vision encoder: stack = model.vision_tower
  patch embedding: patch = model.vision_tower.embeddings.patch_embedding
  vision block: block x N = model.vision_tower.encoder.layers.0
    multi-head attention: attention = model.vision_tower.encoder.layers.0.self_attn
projection W: mlp, 24 -> 32 = model.multi_modal_projector
language model: stack = model.language_model
  word embedding: embedding = model.language_model.embed_tokens
  decoder block: block x N = model.language_model.layers.0
    causal attention: attention = model.language_model.layers.0.self_attn
    swiglu: mlp = model.language_model.layers.0.mlp
  rms norm: norm = model.language_model.norm
language response: head = lm_head
"""

DIT = """
patchify: patch = pos_embed | pos_embed.proj
dit block: block x N = transformer_blocks.0
  embed the timestep: time = transformer_blocks.0.norm1.emb.timestep_embedder
  embed the label: embedding = transformer_blocks.0.norm1.emb.class_embedder | \
transformer_blocks.0.norm1.emb.class_embedder.embedding_table
  scale and shift: modulation, d -> 6d = \
transformer_blocks.0.norm1.linear | transformer_blocks.0.norm1
  layer norm before attention: norm = transformer_blocks.0.norm1.norm
  multi-head self-attention: attention = transformer_blocks.0.attn1
  layer norm before feedforward: norm = transformer_blocks.0.norm3
  pointwise feedforward: mlp, d -> 4d -> d = transformer_blocks.0.ff
final layer norm: norm = norm_out
scale and shift of the output: modulation, d -> 2d = proj_out_1
linear and reshape: head = proj_out_2
"""

UNET = """
time embedding: time = time_embedding
input convolution: conv, 4 -> c = conv_in
down block: stage x 2 = down_blocks.0
  residual block: resnet = down_blocks.0.resnets.0
  spatial transformer: block = down_blocks.0.attentions.0
    self-attention: attention = down_blocks.0.attentions.0.transformer_blocks.0.attn1
    cross-attention: cross-attention = down_blocks.0.attentions.0.transformer_blocks.0.attn2
    feed-forward: mlp = down_blocks.0.attentions.0.transformer_blocks.0.ff
  downsample: down = down_blocks.0.downsamplers.0 | down_blocks.0.downsamplers.0.conv
middle block: stage = mid_block
up block: stage x 2 = up_blocks.0
output convolution: conv, c -> 4 = conv_out
"""

VAE = """
encoder: stack = encoder
  first convolution: conv, 3 -> c = encoder.conv_in
  down block: stage x 2 = encoder.down_blocks.0
    residual block: resnet = encoder.down_blocks.0.resnets.0
  middle of the encoder: stage = encoder.mid_block
    attention over pixels: attention = encoder.mid_block.attentions.0
  mean and log-variance: conv = encoder.conv_out
decoder: stack = decoder
  from the latent: conv, 4 -> 2c = decoder.conv_in
  up block: stage x 2 = decoder.up_blocks.0
    upsample: up = decoder.up_blocks.0.upsamplers.0 | decoder.up_blocks.0.upsamplers.0.conv
  to pixels: conv, c -> 3 = decoder.conv_out
"""

FIGURES = {
    "bart": BART,
    "vit": VIT,
    "mixtral": MIXTRAL,
    "mamba": MAMBA,
    "whisper": WHISPER,
    "clip": CLIP,
    "llava": LLAVA,
    "dit": DIT,
    "unet": UNET,
    "vae": VAE,
}
