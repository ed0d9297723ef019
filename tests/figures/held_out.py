"""Ten models of other families, labelled before the matcher was written, evaluated after it."""

T5 = """
input embedding: embedding, vocab -> d = shared | encoder.embed_tokens
encoder: stack = encoder
  encoder block: block x N = encoder.block.0
    relative position bias: position = \
encoder.block.0.layer.0.SelfAttention.relative_attention_bias
    self-attention: attention = encoder.block.0.layer.0.SelfAttention
    feed forward: mlp, d -> 80 -> d = encoder.block.0.layer.1.DenseReluDense
  final norm of the encoder: norm = encoder.final_layer_norm
decoder: stack = decoder
  decoder block: block x N = decoder.block.0
    causal self-attention: attention = decoder.block.0.layer.0.SelfAttention
    encoder-decoder attention: cross-attention = decoder.block.0.layer.1.EncDecAttention
softmax layer: head = lm_head
"""

BERT = """
token embeddings: embedding, vocab -> d = bert.embeddings.word_embeddings
segment embeddings: embedding, 2 -> d = bert.embeddings.token_type_embeddings
position embeddings: position = bert.embeddings.position_embeddings
trm: block x N = bert.encoder.layer.0
  multi-head attention: attention = \
bert.encoder.layer.0.attention | bert.encoder.layer.0.attention.self
  first add & norm: norm = bert.encoder.layer.0.attention.output.LayerNorm
  feed forward: mlp, d -> 80 -> d = \
bert.encoder.layer.0.intermediate | bert.encoder.layer.0.intermediate.dense
  second add & norm: norm = bert.encoder.layer.0.output.LayerNorm
mask lm: head = cls.predictions.decoder
"""

GPT2 = """
text embed: embedding, vocab -> d = transformer.wte
position embed: position = transformer.wpe
transformer block: block x 2 = transformer.h.0
  layer norm before attention: norm = transformer.h.0.ln_1
  masked multi self attention: attention = transformer.h.0.attn
  layer norm before feed forward: norm = transformer.h.0.ln_2
  feed forward: mlp, d -> 4d -> d = transformer.h.0.mlp
last layer norm: norm = transformer.ln_f
text prediction: head, d -> vocab = lm_head
"""

QWEN3 = """
token embedding layer: embedding = model.embed_tokens
rope: rotary = model.rotary_emb
transformer block: block x N = model.layers.0
  rms norm 1: norm = model.layers.0.input_layernorm
  masked grouped-query attention: attention = model.layers.0.self_attn
    norm of the queries: norm = model.layers.0.self_attn.q_norm
    norm of the keys: norm = model.layers.0.self_attn.k_norm
  rms norm 2: norm = model.layers.0.post_attention_layernorm
  feed forward: mlp, d -> 80 -> d = model.layers.0.mlp
final rms norm: norm = model.norm
linear output layer: head, d -> vocab = lm_head
"""

GEMMA2 = """
embedder: embedding = model.embed_tokens
layer: block x 2 = model.layers.0
  pre-norm of attention: norm = model.layers.0.input_layernorm
  local attention: attention = model.layers.0.self_attn
  post-norm of attention: norm = model.layers.0.post_attention_layernorm
  pre-norm of the feedforward: norm = model.layers.0.pre_feedforward_layernorm
  gated feedforward: mlp = model.layers.0.mlp
    gate: linear = model.layers.0.mlp.gate_proj
  post-norm of the feedforward: norm = model.layers.0.post_feedforward_layernorm
last norm: norm = model.norm
tied output embedding: head = lm_head
"""

DEEPSEEK = """
embedding: embedding = model.embed_tokens
dense transformer block: block = model.layers.0
  multi-head latent attention: attention = model.layers.0.self_attn
    latent of the queries: linear, 32 -> 20 = model.layers.0.self_attn.q_a_proj
    latent of keys and values, with the rope key: linear, 32 -> 18 = \
model.layers.0.self_attn.kv_a_proj_with_mqa
    norm of the latent kv: norm, 14 = model.layers.0.self_attn.kv_a_layernorm
    output projection: linear, 40 -> 32 = model.layers.0.self_attn.o_proj
  dense ffn: mlp = model.layers.0.mlp
moe transformer block: block = model.layers.1
  deepseekmoe: moe = model.layers.1.mlp
    router: router, 32 -> 6 = model.layers.1.mlp.gate
    shared expert: mlp = model.layers.1.mlp.shared_experts
output head: head = lm_head
"""

WAV2VEC2 = """
feature encoder: stack = wav2vec2.feature_extractor
  temporal convolution: conv x 3 = wav2vec2.feature_extractor.conv_layers.0 | \
wav2vec2.feature_extractor.conv_layers.0.conv
projection to the model's size: linear, 24 -> d = wav2vec2.feature_projection.projection
context network: stack = wav2vec2.encoder
  relative positional convolution: conv, d -> d = \
wav2vec2.encoder.pos_conv_embed | wav2vec2.encoder.pos_conv_embed.conv
  transformer block: block x N = wav2vec2.encoder.layers.0
    self-attention: attention = wav2vec2.encoder.layers.0.attention
    norm after attention: norm = wav2vec2.encoder.layers.0.layer_norm
    feed forward: mlp = wav2vec2.encoder.layers.0.feed_forward
    norm after feed forward: norm = wav2vec2.encoder.layers.0.final_layer_norm
ctc output: head = lm_head
"""

SWIN = """
patch partition and linear embedding: patch = \
swin.embeddings.patch_embeddings | swin.embeddings.patch_embeddings.projection
stage 1: stage = swin.encoder.layers.0
  swin transformer block: block x 2 = swin.encoder.layers.0.blocks.0
    layer norm: norm = swin.encoder.layers.0.blocks.0.layernorm_before
    w-msa: attention = swin.encoder.layers.0.blocks.0.attention
    second layer norm: norm = swin.encoder.layers.0.blocks.0.layernorm_after
    mlp: mlp, c -> 4c -> c = swin.encoder.layers.0.blocks.0.mlp
  patch merging: down = swin.encoder.layers.0.downsample
stage 2: stage = swin.encoder.layers.1
norm of the features: norm = swin.layernorm
classifier: head = classifier
"""

SD3 = """
patching: patch = pos_embed | pos_embed.proj
embedding of the timestep: time = time_text_embed.timestep_embedder
mlp of the pooled text: mlp, 28 -> d = time_text_embed.text_embedder
linear of the caption: linear, 20 -> d = context_embedder
mm-dit block: block x N = transformer_blocks.0
  modulation of the latent: modulation, d -> 6d = \
transformer_blocks.0.norm1 | transformer_blocks.0.norm1.linear
  modulation of the caption: modulation, d -> 6d = \
transformer_blocks.0.norm1_context | transformer_blocks.0.norm1_context.linear
  joint attention: attention = transformer_blocks.0.attn
  mlp of the latent: mlp = transformer_blocks.0.ff
  mlp of the caption: mlp = transformer_blocks.0.ff_context
modulation of the output: modulation, d -> 2d = norm_out | norm_out.linear
linear and unpatching: head = proj_out
"""

WAN = """
patch embedding: patch = patch_embedding
rotary position embedding: rotary = rope
embedding of the timestep: time = condition_embedder.time_embedder
shared modulation: modulation, d -> 6d = condition_embedder.time_proj
mlp of the text: mlp, 20 -> d = condition_embedder.text_embedder
dit block: block x 2 = blocks.0
  self-attention: attention = blocks.0.attn1
  cross-attention: cross-attention = blocks.0.attn2
    norm of the queries: norm = blocks.0.attn2.norm_q
  feed-forward: mlp, d -> 60 -> d = blocks.0.ffn
head: head = proj_out
"""

FIGURES = {
    "t5": T5,
    "bert": BERT,
    "gpt2": GPT2,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "deepseek": DEEPSEEK,
    "wav2vec2": WAV2VEC2,
    "swin": SWIN,
    "sd3": SD3,
    "wan": WAN,
}
