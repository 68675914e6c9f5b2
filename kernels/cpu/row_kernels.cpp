// A decoder's operations on one row: norms, gates, soft cap, and the rotation of heads on their way to the cache, all
// in float32. Compiled once per instruction set, each into its own namespace (-DOCTAVO_ISA=...), so it uses nothing of
// the standard library that could be emitted as a shared inline function. Knows no threads and no batch: whatever a
// row's neighbours are, its result is the same, bit for bit.
#include <cstdint>
#include <cstring>

#ifndef OCTAVO_ISA
#define OCTAVO_ISA generic
#endif

#include "cache_elements.h"
#include "lanes.h"
#include "model_ops.h"
#include "paged_attention.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

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

// Norm and rotate one head; element i pairs with i + half. `normed` is scratch.
template <typename Heads>
void rotate_head(const RotateAndWriteArgs& args, const Heads* head, const float* weight, const float* cos,
                 const float* sin, float* normed, float* rotated) {
  const int64_t half = args.head_dim / 2;
  const float scale = weight ? inverse_rms(head, args.head_dim, args.norm_eps) : 1.0f;
  for (int64_t d = 0; d < args.head_dim; d += kLanes) {
    const int64_t count = args.head_dim - d;
    FloatVec v = widen_up_to(head + d, count);
    if (weight) v = v * scale * widen_up_to(weight + d, count);
    narrow_up_to(v, count, normed + d);
  }
  for (int64_t d = 0; d < half; d += kLanes) {
    const int64_t count = half - d;
    const FloatVec first = widen_up_to(normed + d, count), second = widen_up_to(normed + half + d, count);
    const FloatVec c = widen_up_to(cos + d, count), s = widen_up_to(sin + d, count);
    narrow_up_to(first * c - second * s, count, rotated + d);
    narrow_up_to(second * c + first * s, count, rotated + half + d);
  }
}

// A float32 head to the place `offset` elements behind `base`; a quantised one with its scale.
void store_head(const float* head, int64_t size, int32_t type, void* base, int64_t offset, float* scale) {
  switch (type) {
    case kFloat32: write_head(head, size, static_cast<float*>(base) + offset, scale); break;
    case kBFloat16: write_head(head, size, static_cast<BFloat16*>(base) + offset, scale); break;
    case kFloat16: write_head(head, size, static_cast<Float16*>(base) + offset, scale); break;
    case kInt8: write_head(head, size, static_cast<Int8*>(base) + offset, scale); break;
    case kFloat8E4M3: write_head(head, size, static_cast<Float8*>(base) + offset, scale); break;
  }
}

template <typename Heads>
void widen_head(const Heads* head, int64_t size, float* wide) {
  for (int64_t d = 0; d < size; d += kLanes) narrow_up_to(widen_up_to(head + d, size - d), size - d, wide + d);
}

// One head of a slot of the cache: of the keys or of the values, with `strides` and `scale_strides` of block, head, slot.
struct CachePlace {
  int64_t block, slot;

  template <typename Args>
  CachePlace(const Args& args, int64_t token)
      : block(args.slot_mapping[token] / args.block_size), slot(args.slot_mapping[token] % args.block_size) {}

  void write(const float* values, int64_t size, int64_t head, int32_t type, void* cache, const int64_t* strides,
             float* scales, const int64_t* scale_strides) const {
    const int64_t offset = block * strides[0] + head * strides[1] + slot * strides[2];
    if (scales) scales += block * scale_strides[0] + head * scale_strides[1] + slot * scale_strides[2];
    store_head(values, size, type, cache, offset, scales);
  }
};

template <typename Heads>
void rotate_and_write_token(const RotateAndWriteArgs& args, int64_t token, float* scratch) {
  const int64_t head_dim = args.head_dim, num_q_heads = args.num_q_heads, num_kv_heads = args.num_kv_heads;
  const Heads* heads = static_cast<const Heads*>(args.heads) + token * args.heads_strides[0];
  const float* cos = args.cos + token * (head_dim / 2);
  const float* sin = args.sin + token * (head_dim / 2);
  float* rotated = scratch + head_dim;
  const auto rotate = [&](int64_t h) {
    const float* weight = args.norm_weight ? args.norm_weight + h * head_dim : nullptr;
    rotate_head(args, heads + h * args.heads_strides[1], weight, cos, sin, scratch, rotated);
  };
  for (int64_t h = 0; h < num_q_heads; ++h) {
    rotate(h);
    store_head(rotated, head_dim, args.query_type, args.query, (token * num_q_heads + h) * head_dim, nullptr);
  }
  if (args.slot_mapping[token] < 0) return;
  const CachePlace place(args, token);
  for (int64_t h = 0; h < num_kv_heads; ++h) {
    rotate(num_q_heads + h);
    place.write(rotated, head_dim, h, args.cache_type, args.key_cache, args.key_cache_strides, args.key_scale,
                args.key_scale_strides);
    widen_head(heads + (num_q_heads + num_kv_heads + h) * args.heads_strides[1], head_dim, scratch);
    place.write(scratch, head_dim, h, args.cache_type, args.value_cache, args.value_cache_strides, args.value_scale,
                args.value_scale_strides);
  }
}

template <typename Source>
void write_kv_token(const WriteKVArgs& args, int64_t token, float* scratch) {
  if (args.slot_mapping[token] < 0) return;
  const CachePlace place(args, token);
  const Source* key = static_cast<const Source*>(args.key) + token * args.key_strides[0];
  const Source* value = static_cast<const Source*>(args.value) + token * args.value_strides[0];
  for (int64_t h = 0; h < args.num_kv_heads; ++h) {
    widen_head(key + h * args.key_strides[1], args.head_dim, scratch);
    place.write(scratch, args.head_dim, h, args.cache_type, args.key_cache, args.key_cache_strides, args.key_scale,
                args.key_scale_strides);
    widen_head(value + h * args.value_strides[1], args.head_dim, scratch);
    place.write(scratch, args.head_dim, h, args.cache_type, args.value_cache, args.value_cache_strides,
                args.value_scale, args.value_scale_strides);
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
    case kFloat32: rotate_and_write_token<float>(args, token, scratch); break;
    case kBFloat16: rotate_and_write_token<BFloat16>(args, token, scratch); break;
    case kFloat16: rotate_and_write_token<Float16>(args, token, scratch); break;
  }
}

void write_kv(const WriteKVArgs& args, int64_t token, float* scratch) {
  switch (args.source_type) {
    case kFloat32: write_kv_token<float>(args, token, scratch); break;
    case kBFloat16: write_kv_token<BFloat16>(args, token, scratch); break;
    case kFloat16: write_kv_token<Float16>(args, token, scratch); break;
  }
}

}  // namespace

extern const RowKernels kRowKernels = {rms_norm, gate, rotary_angles_row, soft_cap_row, rotate_and_write, write_kv};

}  // namespace OCTAVO_ISA
}  // namespace octavo
