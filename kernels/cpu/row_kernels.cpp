// A decoder's operations on one row: norms, gates, soft cap, and the rotation of heads on their way to the cache, all
// in float32. Compiled once per instruction set, each into its own namespace (-DOCTAVO_ISA=...), so it uses nothing of
// the standard library that could be emitted as a shared inline function. Knows no threads and no batch: whatever a
// row's neighbours are, its result is the same, bit for bit.
#include <cstdint>
#include <cstring>

#ifndef OCTAVO_ISA
#define OCTAVO_ISA generic
#endif

#include "lanes.h"
#include "model_ops.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

template <typename Element>
FloatVec widen_up_to(const Element* p, int64_t count) {
  return count >= kLanes ? widen(p) : widen_partial(p, count);
}

template <typename Element>
void narrow_up_to(FloatVec v, int64_t count, Element* p) {
  Element buffer[kLanes];
  for (int i = 0; i < kLanes; ++i) buffer[i] = narrow(v[i], static_cast<Element*>(nullptr));
  if (count >= kLanes) memcpy(p, buffer, sizeof buffer);
  else memcpy(p, buffer, count * sizeof(Element));
}

void narrow_up_to(FloatVec v, int64_t count, float* p) {
  if (count >= kLanes) store(p, v);
  else memcpy(p, &v, count * sizeof(float));
}

// 1 / sqrt(mean of squares + eps)
template <typename Element>
float inverse_rms(const Element* x, int64_t size, float eps) {
  FloatVec squares = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const FloatVec v = widen_up_to(x + i, size - i);
    squares += v * v;
  }
  return 1.0f / __builtin_sqrtf(lane_sum(squares) / static_cast<float>(size) + eps);
}

template <typename Element>
void rms_norm_row(const RmsNormArgs& args, int64_t row) {
  const Element* normed = static_cast<const Element*>(args.inputs) + row * args.size;
  if (args.residual) {
    const Element* residual = static_cast<const Element*>(args.residual) + row * args.size;
    Element* total = static_cast<Element*>(args.total) + row * args.size;
    for (int64_t i = 0; i < args.size; i += kLanes)
      narrow_up_to(widen_up_to(normed + i, args.size - i) + widen_up_to(residual + i, args.size - i), args.size - i,
                   total + i);
    normed = total;  // rounded to its dtype: what the next layer adds to is what was normed
  }
  const float scale = inverse_rms(normed, args.size, args.eps);
  Element* out = static_cast<Element*>(args.out) + row * args.size;
  for (int64_t i = 0; i < args.size; i += kLanes)
    narrow_up_to(widen_up_to(normed + i, args.size - i) * scale * widen_up_to(args.weight + i, args.size - i),
                 args.size - i, out + i);
}

// From the exponential that cannot overflow: exactly 0 far below 0, so that no large input times it is anything.
FloatVec sigmoid_lanes(FloatVec x) {
  const FloatVec power = exp2_lanes((x < 0.0f ? x : -x) * kLog2E);  // e^-|x|
  return (x < 0.0f ? power : splat(1.0f)) / (1.0f + power);
}

FloatVec activate(FloatVec x, int32_t activation) {
  if (activation == kSilu) return x * sigmoid_lanes(x);
  // (1 + tanh(z)) / 2 is sigmoid(2 z), which does not cancel for z far below 0.
  constexpr float twice_sqrt_2_over_pi = 1.5957691216057308f;
  return x * sigmoid_lanes(twice_sqrt_2_over_pi * (x + 0.044715f * x * x * x));
}

template <typename Element>
void gate_row(const GateArgs& args, int64_t row) {
  const Element* gate = static_cast<const Element*>(args.gate_up) + row * 2 * args.size;
  const Element* up = gate + args.size;
  Element* out = static_cast<Element*>(args.out) + row * args.size;
  for (int64_t i = 0; i < args.size; i += kLanes)
    narrow_up_to(activate(widen_up_to(gate + i, args.size - i), args.activation) * widen_up_to(up + i, args.size - i),
                 args.size - i, out + i);
}

void rotary_angles_row(const RotaryAnglesArgs& args, int64_t token) {
  const float position = static_cast<float>(args.positions[token]);
  float* cos = args.cos + token * args.size;
  float* sin = args.sin + token * args.size;
  for (int64_t i = 0; i < args.size; ++i) {
    const float angle = position * args.inverse_frequencies[i];
    cos[i] = args.magnitude * __builtin_cosf(angle);
    sin[i] = args.magnitude * __builtin_sinf(angle);
  }
}

void soft_cap_row(const SoftCapArgs& args, int64_t row) {
  const float* scores = args.scores + row * args.size;
  float* out = args.out + row * args.size;
  for (int64_t i = 0; i < args.size; i += kLanes)
    narrow_up_to(args.cap * tanh_lanes(widen_up_to(scores + i, args.size - i) / args.cap), args.size - i, out + i);
}

// ---- rotation and cache write ----

// Norm and rotate one head; element i pairs with i + half.
template <typename Heads, typename Out>
void rotate_head(const RotateAndWriteArgs& args, const Heads* head, const float* weight, const float* cos,
                 const float* sin, float* scratch, Out* out) {
  const int64_t half = args.head_dim / 2;
  const float scale = weight ? inverse_rms(head, args.head_dim, args.norm_eps) : 1.0f;
  for (int64_t d = 0; d < args.head_dim; d += kLanes) {
    const int64_t count = args.head_dim - d;
    FloatVec v = widen_up_to(head + d, count);
    if (weight) v = v * scale * widen_up_to(weight + d, count);
    narrow_up_to(v, count, scratch + d);
  }
  for (int64_t d = 0; d < half; d += kLanes) {
    const int64_t count = half - d;
    const FloatVec first = widen_up_to(scratch + d, count), second = widen_up_to(scratch + half + d, count);
    const FloatVec c = widen_up_to(cos + d, count), s = widen_up_to(sin + d, count);
    narrow_up_to(first * c - second * s, count, out + d);
    narrow_up_to(second * c + first * s, count, out + half + d);
  }
}

template <typename Heads, typename Cache>
void rotate_and_write_token(const RotateAndWriteArgs& args, int64_t token, float* scratch) {
  const int64_t head_dim = args.head_dim, num_q_heads = args.num_q_heads, num_kv_heads = args.num_kv_heads;
  const Heads* heads = static_cast<const Heads*>(args.heads) + token * args.heads_strides[0];
  const float* cos = args.cos + token * (head_dim / 2);
  const float* sin = args.sin + token * (head_dim / 2);
  const auto weight = [&](int64_t head) { return args.norm_weight ? args.norm_weight + head * head_dim : nullptr; };
  Heads* query = static_cast<Heads*>(args.query) + token * num_q_heads * head_dim;
  for (int64_t h = 0; h < num_q_heads; ++h)
    rotate_head(args, heads + h * args.heads_strides[1], weight(h), cos, sin, scratch, query + h * head_dim);
  const int64_t slot = args.slot_mapping[token];
  if (slot < 0) return;
  const int64_t block = slot / args.block_size, offset = slot % args.block_size;
  const int64_t *ks = args.key_cache_strides, *vs = args.value_cache_strides;
  Cache* key = static_cast<Cache*>(args.key_cache) + block * ks[0] + offset * ks[2];
  Cache* value = static_cast<Cache*>(args.value_cache) + block * vs[0] + offset * vs[2];
  const Heads* keys = heads + num_q_heads * args.heads_strides[1];
  const Heads* values = keys + num_kv_heads * args.heads_strides[1];
  for (int64_t h = 0; h < num_kv_heads; ++h) {
    rotate_head(args, keys + h * args.heads_strides[1], weight(num_q_heads + h), cos, sin, scratch, key + h * ks[1]);
    for (int64_t d = 0; d < head_dim; d += kLanes)
      narrow_up_to(widen_up_to(values + h * args.heads_strides[1] + d, head_dim - d), head_dim - d,
                   value + h * vs[1] + d);
  }
}

template <typename Heads>
void rotate_and_write_heads(const RotateAndWriteArgs& args, int64_t token, float* scratch) {
  switch (args.cache_type) {
    case kFloat32: rotate_and_write_token<Heads, float>(args, token, scratch); break;
    case kBFloat16: rotate_and_write_token<Heads, BFloat16>(args, token, scratch); break;
    case kFloat16: rotate_and_write_token<Heads, Float16>(args, token, scratch); break;
  }
}

// ---- by element type ----

void rms_norm(const RmsNormArgs& args, int64_t row) {
  switch (args.element_type) {
    case kFloat32: rms_norm_row<float>(args, row); break;
    case kBFloat16: rms_norm_row<BFloat16>(args, row); break;
    case kFloat16: rms_norm_row<Float16>(args, row); break;
  }
}

void gate(const GateArgs& args, int64_t row) {
  switch (args.element_type) {
    case kFloat32: gate_row<float>(args, row); break;
    case kBFloat16: gate_row<BFloat16>(args, row); break;
    case kFloat16: gate_row<Float16>(args, row); break;
  }
}

void rotate_and_write(const RotateAndWriteArgs& args, int64_t token, float* scratch) {
  switch (args.heads_type) {
    case kFloat32: rotate_and_write_heads<float>(args, token, scratch); break;
    case kBFloat16: rotate_and_write_heads<BFloat16>(args, token, scratch); break;
    case kFloat16: rotate_and_write_heads<Float16>(args, token, scratch); break;
  }
}

}  // namespace

extern const RowKernels kRowKernels = {rms_norm, gate, rotary_angles_row, soft_cap_row, rotate_and_write};

}  // namespace OCTAVO_ISA
}  // namespace octavo
