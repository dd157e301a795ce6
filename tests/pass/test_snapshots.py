"""What the pass does to one attention layer of real models, each cut out of the graph of a whole model. How to read a
snapshot: `graph_change.py`."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from graph_change import NORM_AND_ROTATION, change_of

pytest.importorskip("transformers")
pytest.importorskip("diffusers")


def test_qwen3() -> None:
    assert_expected_inline(
        change_of("qwen3", "model.layers.0.self_attn"),
        """\
  cos = emb.cos()
  sin = emb.sin()
  linear = linear(hidden_states_2, q_proj.weight, None)
  view = linear.view((2, 24, -1, 16))
- hidden_states_3 = view.to(torch.float32)
- hidden_states_4 = hidden_states_3 * rsqrt(hidden_states_3.pow(2).mean(-1, keepdim=True) + 1e-06)
- query_states = (q_norm.weight * hidden_states_4.to(torch.float32)).transpose(1, 2)
  linear_1 = linear(hidden_states_2, k_proj.weight, None)
  view_1 = linear_1.view((2, 24, -1, 16))
- hidden_states_5 = view_1.to(torch.float32)
- hidden_states_6 = hidden_states_5 * rsqrt(hidden_states_5.pow(2).mean(-1, keepdim=True) + 1e-06)
- key_states = (k_norm.weight * hidden_states_6.to(torch.float32)).transpose(1, 2)
  cos_3 = (cos * 1.0).to(dtype=torch.float32).unsqueeze(1)
  sin_3 = (sin * 1.0).to(dtype=torch.float32).unsqueeze(1)
- q_embed = (query_states * cos_3) + (cat((-query_states[..., 8:], query_states[..., :8]), dim=-1) *
-     sin_3)
- k_embed = (key_states * cos_3) + (cat((-key_states[..., 8:], key_states[..., :8]), dim=-1) * sin_3)
  getitem_14 = k_embed[:, :, None, :, :]
  attn_output = scaled_dot_product_attention(q_embed, key, value, attn_mask=attention_mask, dropout_p=0.0,
      scale=0.25, is_causal=False)

+ qk_norm_rope_default = qk_norm_rope.default(q=view, k=view_1,
+     cos=cos_3.select(0, 0).select(0, 0).narrow(1, 0, 8).unsqueeze(0),
+     sin=sin_3.select(0, 0).select(0, 0).narrow(1, 0, 8).unsqueeze(0), q_weight=q_norm.weight,
+     k_weight=k_norm.weight, norm='rms', eps=1e-06, norm_scope='head', norm_first=True, rotary_dim=16,
+     rotary_start=0, pairing='halves', conjugate=False, mrope_layout='none', mrope_section=(),
+     out_order='bshd', out_dtype=torch.float32, backend='reference')
+ transpose_4 = qk_norm_rope_default[0].transpose(1, 2)
+ transpose_5 = qk_norm_rope_default[1].transpose(1, 2)
  getitem_14 = transpose_5[:, :, None, :, :]
  attn_output = scaled_dot_product_attention(transpose_4, key, value, attn_mask=attention_mask,
      dropout_p=0.0, scale=0.25, is_causal=False)""",
    )


def test_qwen3_with_attention() -> None:
    assert_expected_inline(
        change_of("qwen3", "model.layers.0.self_attn", (*NORM_AND_ROTATION, "attention")),
        """\
  position_ids_1 = (arange(24, device=device(type='cpu')) + 0).unsqueeze(0)
  position_ids_2 = position_ids_1.expand(2, -1)
  packed_sequence_mask = ne(diff(position_ids_2, prepend=position_ids_2[:, :1] - 1, dim=-1), 1).cumsum(-1)
  expand_1 = position_ids_1.expand(2, -1)
  batch_indices = arange(2, device=device(type='cpu'))[:, None, None, None]
  q_indices = (arange(24, device=device(type='cpu')) + 0)[None, None, :, None]
  kv_indices = (arange(24, device=device(type='cpu')) + 0)[None, None, None, :]
  le = expand_1[batch_indices, kv_indices] <= expand_1[batch_indices, q_indices]
  eq = packed_sequence_mask[batch_indices, q_indices] == packed_sequence_mask[batch_indices, kv_indices]
  result_2 = (q_indices.new_ones((), dtype=torch.bool) & le.to(device(type='cpu'))) &
      eq.to(device(type='cpu'))
  attention_mask = result_2.expand(2, -1, 24, 24)
  cos = emb.cos()
  sin = emb.sin()
  linear = linear(hidden_states_2, q_proj.weight, None)
  view = linear.view((2, 24, -1, 16))
- hidden_states_3 = view.to(torch.float32)
- hidden_states_4 = hidden_states_3 * rsqrt(hidden_states_3.pow(2).mean(-1, keepdim=True) + 1e-06)
- query_states = (q_norm.weight * hidden_states_4.to(torch.float32)).transpose(1, 2)
  linear_1 = linear(hidden_states_2, k_proj.weight, None)
  view_1 = linear_1.view((2, 24, -1, 16))
- hidden_states_5 = view_1.to(torch.float32)
- hidden_states_6 = hidden_states_5 * rsqrt(hidden_states_5.pow(2).mean(-1, keepdim=True) + 1e-06)
- key_states = (k_norm.weight * hidden_states_6.to(torch.float32)).transpose(1, 2)
  linear_2 = linear(hidden_states_2, v_proj.weight, None)
  view_2 = linear_2.view((2, 24, -1, 16))
  cos_3 = (cos * 1.0).to(dtype=torch.float32).unsqueeze(1)
  sin_3 = (sin * 1.0).to(dtype=torch.float32).unsqueeze(1)
- q_embed = (query_states * cos_3) + (cat((-query_states[..., 8:], query_states[..., :8]), dim=-1) *
-     sin_3)
- k_embed = (key_states * cos_3) + (cat((-key_states[..., 8:], key_states[..., :8]), dim=-1) * sin_3)
- key = k_embed[:, :, None, :, :].expand(2, 2, 2, 24, 16).reshape(2, 4, 24, 16)
- value = view_2.transpose(1, 2)[:, :, None, :, :].expand(2, 2, 2, 24, 16).reshape(2, 4, 24, 16)
- attn_output = scaled_dot_product_attention(q_embed, key, value, attn_mask=attention_mask, dropout_p=0.0,
-     scale=0.25, is_causal=False)
- attn_output_2 = attn_output.reshape(2, -1, 24, 16).transpose(1, 2).contiguous()
  reshape_3 = attn_output_2.reshape(2, 24, -1)

+ qk_norm_rope_default = qk_norm_rope.default(q=view, k=view_1,
+     cos=cos_3.select(0, 0).select(0, 0).narrow(1, 0, 8).unsqueeze(0),
+     sin=sin_3.select(0, 0).select(0, 0).narrow(1, 0, 8).unsqueeze(0), q_weight=q_norm.weight,
+     k_weight=k_norm.weight, norm='rms', eps=1e-06, norm_scope='head', norm_first=True, rotary_dim=16,
+     rotary_start=0, pairing='halves', conjugate=False, mrope_layout='none', mrope_section=(),
+     out_order='bshd', out_dtype=torch.float32, backend='reference')
+ attention_default = attention.default(q=qk_norm_rope_default[0], k=qk_norm_rope_default[1], v=view_2,
+     scale=0.25, causal='top_left', window_left=-1, window_right=-1, softcap=0.0, out_order='bshd',
+     backend='reference')
+ getitem_19 = attention_default[0]
  reshape_3 = getitem_19.reshape(2, 24, -1)""",
    )


def test_qwen3_vl() -> None:
    """With a mask that is given: whether transformers makes one depends on the version of torch."""
    causal = torch.ones(24, 24, dtype=torch.bool).tril().expand(2, 1, 24, 24)
    assert_expected_inline(
        change_of("qwen3_vl", "layers.0.self_attn", given={"attention_mask": causal}),
        """\
  cos = freqs.cos()
  cos_1 = cos * 1.0
  sin = freqs.sin()
  sin_1 = sin * 1.0
  freqs_thw = sin_1[0]
  getitem_2 = sin_1[1, ..., 1:6:3]
  setitem = setitem(freqs_thw, (..., 1:6:3), getitem_2)
  getitem_3 = sin_1[2, ..., 2:6:3]
  setitem_1 = setitem(freqs_thw, (..., 2:6:3), getitem_3)
  sin_2 = cat((freqs_thw, freqs_thw), dim=-1)
  freqs_thw_1 = cos_1[0]
  getitem_5 = cos_1[1, ..., 1:6:3]
  setitem_2 = setitem(freqs_thw_1, (..., 1:6:3), getitem_5)
  getitem_6 = cos_1[2, ..., 2:6:3]
  setitem_3 = setitem(freqs_thw_1, (..., 2:6:3), getitem_6)
  linear = linear(hidden_states_2, q_proj.weight, None)
  view = linear.view((2, 24, -1, 16))
- hidden_states_3 = view.to(torch.float32)
- hidden_states_4 = hidden_states_3 * rsqrt(hidden_states_3.pow(2).mean(-1, keepdim=True) + 1e-06)
- query_states = (q_norm.weight * hidden_states_4.to(torch.float32)).transpose(1, 2)
  linear_1 = linear(hidden_states_2, k_proj.weight, None)
  view_1 = linear_1.view((2, 24, -1, 16))
- hidden_states_5 = view_1.to(torch.float32)
- hidden_states_6 = hidden_states_5 * rsqrt(hidden_states_5.pow(2).mean(-1, keepdim=True) + 1e-06)
- key_states = (k_norm.weight * hidden_states_6.to(torch.float32)).transpose(1, 2)
  cos_4 = cat((freqs_thw_1, freqs_thw_1), dim=-1).to(dtype=torch.float32).unsqueeze(1)
  sin_4 = sin_2.to(dtype=torch.float32).unsqueeze(1)
- q_embed = (query_states * cos_4) + (cat((-query_states[..., 8:], query_states[..., :8]), dim=-1) *
-     sin_4)
- k_embed = (key_states * cos_4) + (cat((-key_states[..., 8:], key_states[..., :8]), dim=-1) * sin_4)
  getitem_11 = k_embed[:, :, None, :, :]
  attn_output = scaled_dot_product_attention(q_embed, key, value, attn_mask=l_kwargs_attention_mask,
      dropout_p=0.0, scale=0.25, is_causal=False)

+ qk_norm_rope_default = qk_norm_rope.default(q=view, k=view_1, cos=cos_4.select(1, 0).narrow(2, 0, 8),
+     sin=sin_4.select(1, 0).narrow(2, 0, 8), q_weight=q_norm.weight, k_weight=k_norm.weight, norm='rms',
+     eps=1e-06, norm_scope='head', norm_first=True, rotary_dim=16, rotary_start=0, pairing='halves',
+     conjugate=False, mrope_layout='none', mrope_section=(), out_order='bshd', out_dtype=torch.float32,
+     backend='reference')
+ transpose_4 = qk_norm_rope_default[0].transpose(1, 2)
+ transpose_5 = qk_norm_rope_default[1].transpose(1, 2)
  getitem_11 = transpose_5[:, :, None, :, :]
  attn_output = scaled_dot_product_attention(transpose_4, key, value, attn_mask=l_kwargs_attention_mask,
      dropout_p=0.0, scale=0.25, is_causal=False)""",
    )


def test_gemma3() -> None:
    assert_expected_inline(
        change_of("gemma3", "model.layers.0.self_attn"),
        """\
  cos = emb.cos()
  sin = emb.sin()
  linear = linear(hidden_states, q_proj.weight, None)
  view = linear.view((2, 24, -1, 16))
- query_states = view.transpose(1, 2)
  linear_1 = linear(hidden_states, k_proj.weight, None)
  view_1 = linear_1.view((2, 24, -1, 16))
- key_states = view_1.transpose(1, 2)
- float_4 = query_states.float()
- output_3 = (float_4 * rsqrt(float_4.pow(2).mean(-1, keepdim=True) + 1e-06)) * (1.0 +
-     q_norm.weight.float())
- query_states_1 = output_3.type_as(query_states)
- float_6 = key_states.float()
- output_5 = (float_6 * rsqrt(float_6.pow(2).mean(-1, keepdim=True) + 1e-06)) * (1.0 +
-     k_norm.weight.float())
- key_states_1 = output_5.type_as(key_states)
  cos_3 = (cos * 1.0).to(dtype=torch.float32).unsqueeze(1)
  sin_3 = (sin * 1.0).to(dtype=torch.float32).unsqueeze(1)
- mul_11 = cat((-query_states_1[..., 8:], query_states_1[..., :8]), dim=-1) * sin_3
- q_embed = (query_states_1 * cos_3) + mul_11
- k_embed = (key_states_1 * cos_3) + (cat((-key_states_1[..., 8:], key_states_1[..., :8]), dim=-1) *
-     sin_3)
  getitem_23 = k_embed[:, :, None, :, :]
  attn_output = scaled_dot_product_attention(q_embed, key, value, attn_mask=attention_mask_1,
      dropout_p=0.0, scale=0.0625, is_causal=False)

+ qk_norm_rope_default = qk_norm_rope.default(q=view, k=view_1,
+     cos=cos_3.select(0, 0).select(0, 0).narrow(1, 0, 8).unsqueeze(0),
+     sin=sin_3.select(0, 0).select(0, 0).narrow(1, 0, 8).unsqueeze(0), q_weight=q_norm.weight,
+     k_weight=k_norm.weight, norm='rms_one_plus', eps=1e-06, norm_scope='head', norm_first=True,
+     rotary_dim=16, rotary_start=0, pairing='halves', conjugate=False, mrope_layout='none',
+     mrope_section=(), out_order='bshd', out_dtype=torch.float32, backend='reference')
+ transpose_4 = qk_norm_rope_default[0].transpose(1, 2)
+ transpose_5 = qk_norm_rope_default[1].transpose(1, 2)
  getitem_23 = transpose_5[:, :, None, :, :]
  attn_output = scaled_dot_product_attention(transpose_4, key, value, attn_mask=attention_mask_1,
      dropout_p=0.0, scale=0.0625, is_causal=False)""",
    )


def test_olmo2() -> None:
    assert_expected_inline(
        change_of("olmo2", "model.layers.0.self_attn"),
        """\
  cos = emb.cos()
  sin = emb.sin()
  linear = linear(inputs_embeds, q_proj.weight, None)
- hidden_states = linear.to(torch.float32)
- hidden_states_1 = hidden_states * rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + 1e-05)
  linear_1 = linear(inputs_embeds, k_proj.weight, None)
- hidden_states_2 = linear_1.to(torch.float32)
- hidden_states_3 = hidden_states_2 * rsqrt(hidden_states_2.pow(2).mean(-1, keepdim=True) + 1e-05)
- view = (q_norm.weight * hidden_states_1).to(torch.float32).view((2, 24, -1, 16))
- query_states_1 = view.transpose(1, 2)
- view_1 = (k_norm.weight * hidden_states_3).to(torch.float32).view((2, 24, -1, 16))
- key_states_1 = view_1.transpose(1, 2)
  cos_2 = (cos * 1.0).unsqueeze(1)
  sin_2 = (sin * 1.0).unsqueeze(1)
- mul_8 = cat((-query_states_1[..., 8:], query_states_1[..., :8]), dim=-1) * sin_2
- k_embed = (key_states_1 * cos_2) + (cat((-key_states_1[..., 8:], key_states_1[..., :8]), dim=-1) *
-     sin_2)
- query_states_2 = ((query_states_1 * cos_2) + mul_8).to(torch.float32)
- key_states_2 = k_embed.to(torch.float32)
  getitem_14 = key_states_2[:, :, None, :, :]
  attn_output = scaled_dot_product_attention(query_states_2, key, value, attn_mask=attention_mask,
      dropout_p=0.0, scale=0.25, is_causal=False)

+ qk_norm_rope_default = qk_norm_rope.default(q=linear.unflatten(-1, (4, 16)),
+     k=linear_1.unflatten(-1, (2, 16)), cos=cos_2.select(0, 0).select(0, 0).narrow(1, 0, 8).unsqueeze(0),
+     sin=sin_2.select(0, 0).select(0, 0).narrow(1, 0, 8).unsqueeze(0), q_weight=q_norm.weight,
+     k_weight=k_norm.weight, norm='rms', eps=1e-05, norm_scope='hidden', norm_first=True, rotary_dim=16,
+     rotary_start=0, pairing='halves', conjugate=False, mrope_layout='none', mrope_section=(),
+     out_order='bshd', out_dtype=torch.float32, backend='reference')
+ transpose_4 = qk_norm_rope_default[0].transpose(1, 2)
+ transpose_5 = qk_norm_rope_default[1].transpose(1, 2)
  getitem_14 = transpose_5[:, :, None, :, :]
  attn_output = scaled_dot_product_attention(transpose_4, key, value, attn_mask=attention_mask,
      dropout_p=0.0, scale=0.25, is_causal=False)""",
    )


def test_glm4() -> None:
    assert_expected_inline(
        change_of("glm4", "model.layers.0.self_attn"),
        """\
  cos = emb.cos()
  sin = emb.sin()
  linear = linear(hidden_states_2, q_proj.weight, q_proj.bias)
  view = linear.view((2, 24, -1, 16))
- query_states = view.transpose(1, 2)
  linear_1 = linear(hidden_states_2, k_proj.weight, k_proj.bias)
  view_1 = linear_1.view((2, 24, -1, 16))
- key_states = view_1.transpose(1, 2)
  cos_4 = (cos * 1.0).to(dtype=torch.float32).unsqueeze(1)[..., :4].repeat_interleave(2, dim=-1)
  sin_4 = (sin * 1.0).to(dtype=torch.float32).unsqueeze(1)[..., :4].repeat_interleave(2, dim=-1)
- q_rot = query_states[..., :8]
- k_rot = key_states[..., :8]
- mul_6 = stack((-q_rot[..., 1::2], q_rot[..., 0::2]), dim=-1).flatten(-2) * sin_4
- mul_8 = stack((-k_rot[..., 1::2], k_rot[..., 0::2]), dim=-1).flatten(-2) * sin_4
- q_embed_1 = cat(((q_rot * cos_4) + mul_6, query_states[..., 8:]), dim=-1)
- k_embed_1 = cat(((k_rot * cos_4) + mul_8, key_states[..., 8:]), dim=-1)
  getitem_20 = k_embed_1[:, :, None, :, :]
  attn_output = scaled_dot_product_attention(q_embed_1, key, value, attn_mask=attention_mask,
      dropout_p=0.0, scale=0.25, is_causal=False)

+ unsqueeze_3 = cos_4.select(0, 0).select(0, 0).unflatten(1, (4, 2)).select(2, 0).unsqueeze(0)
+ unsqueeze_4 = sin_4.select(0, 0).select(0, 0).unflatten(1, (4, 2)).select(2, 0).unsqueeze(0)
+ qk_norm_rope_default = qk_norm_rope.default(q=view, k=view_1, cos=unsqueeze_3, sin=unsqueeze_4,
+     norm='none', rotary_dim=8, rotary_start=0, pairing='adjacent', conjugate=False, mrope_layout='none',
+     mrope_section=(), out_order='bhsd', out_dtype=torch.float32, backend='reference')
+ transpose_4 = qk_norm_rope_default[0].transpose(1, 2)
+ transpose_5 = qk_norm_rope_default[1].transpose(1, 2)
  getitem_20 = transpose_5[:, :, None, :, :]
  attn_output = scaled_dot_product_attention(transpose_4, key, value, attn_mask=attention_mask,
      dropout_p=0.0, scale=0.25, is_causal=False)""",
    )


def test_llama4() -> None:
    assert_expected_inline(
        change_of("llama4", "model.layers.0.self_attn"),
        """\
  freqs_cis = polar(ones_like, freqs)
  linear = linear(hidden_states, q_proj.weight, None)
  query_states = linear.view((2, 24, -1, 16))
  linear_1 = linear(hidden_states, k_proj.weight, None)
  key_states = linear_1.view(2, 24, -1, 16)
  to_6 = (freqs_cis * 1.0).to(device(type='cpu'))
  getitem_12 = to_6[:, :, None, :]
- mul_4 = view_as_complex(query_states.float().reshape(2, 24, 4, -1, 2)) * getitem_12
- mul_5 = view_as_complex(key_states.float().reshape(2, 24, 2, -1, 2)) * to_6[:, :, None, :]
- query_states_1 = view_as_real(mul_4).flatten(3).type_as(query_states)
- key_states_1 = view_as_real(mul_5).flatten(3).type_as(key_states)
- float_5 = query_states_1.float()
- query_states_2 = (float_5 * rsqrt(float_5.pow(2).mean(-1, keepdim=True) +
-     1e-05)).type_as(query_states_1)
- float_6 = key_states_1.float()
- key_states_2 = (float_6 * rsqrt(float_6.pow(2).mean(-1, keepdim=True) + 1e-05)).type_as(key_states_1)
- query_states_3 = query_states_2.transpose(1, 2)
- key_states_3 = key_states_2.transpose(1, 2)
  getitem_14 = key_states_3[:, :, None, :, :]
  attn_output = scaled_dot_product_attention(query_states_3, key, value, attn_mask=attention_mask,
      dropout_p=0.0, scale=0.25, is_causal=False)

+ select_1 = getitem_12.view(torch.float32).unflatten(-1, (8, 2)).select(0, 0).select(1, 0)
+ select_4 = getitem_12.view(torch.float32).unflatten(-1, (8, 2)).select(0, 0).select(1, 0)
+ qk_norm_rope_default = qk_norm_rope.default(q=query_states, k=key_states,
+     cos=select_1.select(2, 0).unsqueeze(0), sin=select_4.select(2, 1).unsqueeze(0), norm='rms',
+     eps=1e-05, norm_scope='head', norm_first=False, rotary_dim=16, rotary_start=0, pairing='adjacent',
+     conjugate=False, mrope_layout='none', mrope_section=(), out_order='bshd', out_dtype=torch.float32,
+     backend='reference')
+ transpose_4 = qk_norm_rope_default[0].transpose(1, 2)
+ transpose_5 = qk_norm_rope_default[1].transpose(1, 2)
  getitem_14 = transpose_5[:, :, None, :, :]
  attn_output = scaled_dot_product_attention(transpose_4, key, value, attn_mask=attention_mask,
      dropout_p=0.0, scale=0.25, is_causal=False)""",
    )


def test_deepseek_v3() -> None:
    assert_expected_inline(
        change_of("deepseek_v3", "model.layers.0.self_attn"),
        """\
  cos = emb.cos()
  sin = emb.sin()
  q_states = linear(mul_6, q_b_proj.weight, None)
  view = q_states.view((2, 24, -1, 24))
- split = split(view.transpose(1, 2), (16, 8), dim=-1)
- q_rot = split[1]
  compressed_kv = linear(hidden_states_2, kv_a_proj_with_mqa.weight, None)
  split_1 = split(compressed_kv, (16, 8), dim=-1)
  k_rot_1 = split_1[1].view(2, 1, 24, 8)
  cos_3 = (cos * 1.0).to(dtype=torch.float32)[..., :4].unsqueeze(1)
  sin_3 = (sin * 1.0).to(dtype=torch.float32)[..., :4].unsqueeze(1)
- q1 = q_rot[..., 0::2]
- q2 = q_rot[..., 1::2]
- k1 = k_rot_1[..., 0::2]
- k2 = k_rot_1[..., 1::2]
- q_embed = cat(((q1 * cos_3) - (q2 * sin_3), (q2 * cos_3) + (q1 * sin_3)), dim=-1)
- k_embed = cat(((k1 * cos_3) - (k2 * sin_3), (k2 * cos_3) + (k1 * sin_3)), dim=-1)
- query_states = cat((split[0], q_embed), dim=-1)
  k_rot_2 = k_embed.expand(-1, 4, -1, -1)
  attn_output = scaled_dot_product_attention(query_states, key_states, value_states,
      attn_mask=attention_mask, dropout_p=0.0, scale=0.2041241452319315, is_causal=False)

+ rope_default_1 = rope.default(x=k_rot_1.transpose(1, 2),
+     cos=cos_3.select(0, 0).select(0, 0).unsqueeze(0), sin=sin_3.select(0, 0).select(0, 0).unsqueeze(0),
+     rotary_dim=8, rotary_start=0, pairing='adjacent_to_halves', conjugate=False, mrope_layout='none',
+     mrope_section=(), out_order='bhsd', out_dtype=torch.float32, backend='reference')
+ transpose_5 = rope_default_1.transpose(1, 2)
+ rope_default = rope.default(x=view, cos=cos_3.select(0, 0).select(0, 0).unsqueeze(0),
+     sin=sin_3.select(0, 0).select(0, 0).unsqueeze(0), rotary_dim=8, rotary_start=16,
+     pairing='adjacent_to_halves', conjugate=False, mrope_layout='none', mrope_section=(),
+     out_order='bhsd', out_dtype=torch.float32, backend='reference')
+ transpose_3 = rope_default.transpose(1, 2)
  k_rot_2 = transpose_5.expand(-1, 4, -1, -1)
  attn_output = scaled_dot_product_attention(transpose_3, key_states, value_states,
      attn_mask=attention_mask, dropout_p=0.0, scale=0.2041241452319315, is_causal=False)""",
    )


def test_flux() -> None:
    assert_expected_inline(
        change_of("flux", "transformer_blocks.0.attn"),
        """\
  cos_1 = freqs_1.cos()
  sin_1 = freqs_1.sin()
  cos_2 = freqs_3.cos()
  sin_2 = freqs_3.sin()
  cos_3 = freqs_5.cos()
  sin_3 = freqs_5.sin()
  cat_3 = cat((cos_1.repeat_interleave(2, dim=1, output_size=4).float(),
      cos_2.repeat_interleave(2, dim=1, output_size=4).float(),
      cos_3.repeat_interleave(2, dim=1, output_size=8).float()), dim=-1)
  freqs_cos_3 = cat_3.to(device(type='cpu'))
  cat_4 = cat((sin_1.repeat_interleave(2, dim=1, output_size=4).float(),
      sin_2.repeat_interleave(2, dim=1, output_size=4).float(),
      sin_3.repeat_interleave(2, dim=1, output_size=8).float()), dim=-1)
  freqs_sin_3 = cat_4.to(device(type='cpu'))
  query = linear(x, to_q.weight, to_q.bias)
  key = linear(x, to_k.weight, to_k.bias)
  encoder_query = linear(x_1, add_q_proj.weight, add_q_proj.bias)
  encoder_key = linear(x_1, add_k_proj.weight, add_k_proj.bias)
  encoder_query_2 = rms_norm(encoder_query.unflatten(-1, (-1, 16)), (16,), norm_added_q.weight, 1e-06)
  encoder_key_2 = rms_norm(encoder_key.unflatten(-1, (-1, 16)), (16,), norm_added_k.weight, 1e-06)
  query_3 = cat((encoder_query_2, rms_norm(query.unflatten(-1, (-1, 16)), (16,), norm_q.weight, 1e-06)),
      dim=1)
  key_3 = cat((encoder_key_2, rms_norm(key.unflatten(-1, (-1, 16)), (16,), norm_k.weight, 1e-06)), dim=1)
  cos_5 = freqs_cos_3[None, :, None, :].to(device(type='cpu'))
  sin_5 = freqs_sin_3[None, :, None, :].to(device(type='cpu'))
- unbind = query_3.reshape(1, 24, 2, -1, 2).unbind(-1)
- add_5 = (query_3.float() * cos_5) + (stack((-unbind[1], unbind[0]), dim=-1).flatten(3).float() * sin_5)
- unbind_1 = key_3.reshape(1, 24, 2, -1, 2).unbind(-1)
- mul_9 = stack((-unbind_1[1], unbind_1[0]), dim=-1).flatten(3).float() * freqs_sin_3[None, :, None,
-     :].to(device(type='cpu'))
- add_6 = (key_3.float() * freqs_cos_3[None, :, None, :].to(device(type='cpu'))) + mul_9
- query_4 = add_5.to(torch.float32).permute(0, 2, 1, 3)
- key_4 = add_6.to(torch.float32).permute(0, 2, 1, 3)
  out_2 = scaled_dot_product_attention(query=query_4, key=key_4, value=value_3, attn_mask=None,
      dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)

+ unsqueeze_7 = cos_5.select(0, 0).select(1, 0).unflatten(1, (8, 2)).select(2, 0).unsqueeze(0)
+ unsqueeze_8 = sin_5.select(0, 0).select(1, 0).unflatten(1, (8, 2)).select(2, 0).unsqueeze(0)
+ qk_norm_rope_default_1 = qk_norm_rope.default(q=query_3, k=key_3, cos=unsqueeze_7, sin=unsqueeze_8,
+     norm='none', rotary_dim=16, rotary_start=0, pairing='adjacent', conjugate=False,
+     mrope_layout='none', mrope_section=(), out_order='bshd', out_dtype=torch.float32,
+     backend='reference')
+ transpose_2 = qk_norm_rope_default_1[0].transpose(1, 2)
+ transpose_3 = qk_norm_rope_default_1[1].transpose(1, 2)
  out_2 = scaled_dot_product_attention(query=transpose_2, key=transpose_3, value=value_3, attn_mask=None,
      dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)""",
    )


def test_qwen3_fused_qkv() -> None:
    assert_expected_inline(
        change_of("qwen3_fused_qkv", "layers.0"),
        """\
  cos = angles_1.cos()
  sin = angles_1.sin()
  linear = linear(rms_norm, wqkv.weight, None)
- split = linear.view(2, 24, 2, 4, 16).split((2, 1, 1), dim=3)
- rms_norm_1 = rms_norm(split[0].flatten(2, 3), (16,), q_norm.weight, 1e-06)
- chunk = rms_norm_1.chunk(2, dim=-1)
  getitem_5 = cos[None, :, None]
  getitem_6 = sin[None, :, None]
- add = (rms_norm_1 * getitem_5) + (cat((-chunk[1], chunk[0]), dim=-1) * getitem_6)
- rms_norm_2 = rms_norm(split[1].squeeze(3), (16,), k_norm.weight, 1e-06)
- chunk_1 = rms_norm_2.chunk(2, dim=-1)
- add_1 = (rms_norm_2 * cos[None, :, None]) + (cat((-chunk_1[1], chunk_1[0]), dim=-1) * sin[None, :,
-     None])
- q_3 = add.to(torch.float32).transpose(1, 2)
- k_3 = add_1.to(torch.float32).transpose(1, 2)
- v_2 = split[2].squeeze(3).transpose(1, 2)
  mixed = scaled_dot_product_attention(q_3, k_3, v_2, is_causal=True, enable_gqa=True)

+ qkv_norm_rope_default = qkv_norm_rope.default(qkv=linear,
+     cos=getitem_5.select(0, 0).select(1, 0).narrow(1, 0, 8).unsqueeze(0),
+     sin=getitem_6.select(0, 0).select(1, 0).narrow(1, 0, 8).unsqueeze(0), q_weight=q_norm.weight,
+     k_weight=k_norm.weight, num_heads=4, num_kv_heads=2, head_dim=16, packing='grouped', norm='rms',
+     eps=1e-06, norm_scope='head', norm_first=True, rotary_dim=16, rotary_start=0, pairing='halves',
+     conjugate=False, mrope_layout='none', mrope_section=(), out_order='bshd', out_dtype=torch.float32,
+     backend='reference')
+ transpose_4 = qkv_norm_rope_default[0].transpose(1, 2)
+ transpose_5 = qkv_norm_rope_default[1].transpose(1, 2)
+ transpose_6 = qkv_norm_rope_default[2].transpose(1, 2)
  mixed = scaled_dot_product_attention(transpose_4, transpose_5, transpose_6, is_causal=True,
      enable_gqa=True)""",
    )
