// All layers of a decoder in one call: norms, products with quantised weights, rotary embedding, attention over the
// paged cache and gates, in one team of threads. Knows no arithmetic: the kernels of the instruction set that the
// caller chose do that, row by row and tile by tile as in calls of a single operation.
#include "decoder_layers.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <new>

#include "attend_plan.h"
#include "quantized_tasks.h"
#include "threads.h"

namespace octavo {
namespace {

constexpr int64_t kLoopsPerLayer = 12;  // at most
constexpr int64_t kRowsPerTask = 4;

// Hands out parts of a buffer; without one it only adds up what they take.
class Carver {
 public:
  explicit Carver(float* base) : base_(base) {}

  float* floats(int64_t count) {
    float* part = base_ ? base_ + size_ : nullptr;
    size_ += (count + 15) / 16 * 16;  // whole cache lines
    return part;
  }

  int64_t size() const { return size_; }

 private:
  float* base_;
  int64_t size_ = 0;
};

// What products and attention write: all threads share it.
struct SharedBuffers {
  float *heads, *query, *attended, *delta, *gated;  // gated: quantised

  SharedBuffers(const DecoderArgs& args, Carver& carver) {
    const int64_t num_q = args.write.num_q_heads, num_heads = num_q + 2 * args.write.num_kv_heads;
    heads = carver.floats(args.num_tokens * num_heads * args.write.head_dim);
    query = carver.floats(args.num_tokens * num_q * args.write.head_dim);
    attended = carver.floats(args.num_tokens * num_q * args.write.head_dim);
    delta = carver.floats(args.num_tokens * args.hidden_size);
    gated = carver.floats(quantized_rows_floats(args.num_tokens, args.intermediate_size));
  }
};

// What operations on rows write.
struct RowBuffers {
  float *residual, *quantized;

  RowBuffers(const DecoderArgs& args, Carver& carver) {
    residual = carver.floats(args.num_tokens * args.hidden_size);
    const int64_t widest = std::max(args.hidden_size, args.write.num_q_heads * args.write.head_dim);
    quantized = carver.floats(quantized_rows_floats(args.num_tokens, widest));
  }
};

// What a step decides once, for all layers and threads.
struct Step {
  const DecoderArgs& args;
  const KernelSet& kernels;
  // Few rows are not worth waiting for: every thread then computes all of them, into buffers of its own, and only
  // products and attention are shared out.
  const bool replicates;
  Team team;
  AttendPlan whole, windowed;  // of layers without and with a sliding window
  std::atomic<Status> status{kOk};

  Step(const DecoderArgs& decoder, const KernelSet& set)
      : args(decoder),
        kernels(set),
        replicates(decoder.num_tokens < 2 * decoder.num_threads),
        team(decoder.num_threads, (decoder.num_layers + 1) * kLoopsPerLayer) {}

  Status plan() {
    for (int64_t i = 0; i < args.num_layers; ++i) {
      AttendArgs attend = args.attend;
      attend.sliding_window = args.layers[i].sliding_window;
      AttendPlan& plan = attend.sliding_window ? windowed : whole;
      if (!plan.tasks.empty()) continue;
      if (const Status failed = plan_attend(attend, plan)) return failed;
    }
    return kOk;
  }

  int64_t num_row_buffers() const { return replicates ? args.num_threads : 1; }
};

// The layers as one thread runs them.
class LayerThread {
 public:
  LayerThread(Step& step, const SharedBuffers& shared, const RowBuffers& rows, float* normed, int64_t thread)
      : step_(step),
        args_(step.args),
        shared_(shared),
        rows_(rows),
        normed_(normed),
        thread_(thread),
        num_rows_(step.args.num_tokens) {}

  void run() {
    const int64_t size = args_.hidden_size;
    started_ = Clock::now();
    for_rows(kNorms, [&](int64_t row) {
      std::memcpy(rows_.residual + row * size, args_.residual + row * size, size * sizeof(float));
    });
    for (int64_t i = 0; i < args_.num_layers; ++i) {
      const LayerWeights& layer = args_.layers[i];
      norm_and_quantize(i ? args_.layers[i - 1].mlp_output_norm : nullptr, i > 0, layer.attention_norm);
      multiply(layer.qkv, rows_of(rows_.quantized, layer.qkv), shared_.heads);
      attend(layer, args_.caches[i]);
      if (i + 1 == args_.num_layers && args_.wanted) num_rows_ = args_.num_wanted;
      const QuantizedRows attended = rows_of(rows_.quantized, layer.output);
      for_rows(kRounding, [&](int64_t row) { quantize(shared_.attended, token_of(row), attended, row); });
      multiply(layer.output, attended, shared_.delta);
      norm_and_quantize(layer.attention_output_norm, true, layer.mlp_norm);
      gate(layer.gate_up);
      multiply(layer.down, rows_of(shared_.gated, layer.down), shared_.delta);
    }
    const float* delta_norm = args_.layers[args_.num_layers - 1].mlp_output_norm;
    for_rows(kNorms, [&](int64_t row) {
      float* out = thread_ == 0 || !step_.replicates ? args_.out + token_of(row) * size : normed_;
      add_and_norm(delta_norm, true, args_.final_norm, out, row);
    });
  }

 private:
  using Clock = std::chrono::steady_clock;

  // Runs body(i) for every i in [0, count), shared out among the team.
  template <typename Body>
  void for_each(LayerPart part, int64_t count, const Body& body) {
    step_.team.for_each(loop_, thread_, count, body);
    add_time(part);
  }

  void add_time(LayerPart part) {
    if (!args_.seconds || thread_ != 0) return;
    const Clock::time_point now = Clock::now();
    args_.seconds[part] += std::chrono::duration<double>(now - started_).count();
    started_ = now;
  }

  template <typename Body>
  void for_rows(LayerPart part, const Body& body) {
    if (step_.replicates) {
      for (int64_t row = 0; row < num_rows_; ++row) body(row);
      add_time(part);
      return;
    }
    for_each(part, ceil_div(num_rows_, kRowsPerTask), [&](int64_t chunk) {
      const int64_t end = std::min(num_rows_, (chunk + 1) * kRowsPerTask);
      for (int64_t row = chunk * kRowsPerTask; row < end; ++row) body(row);
    });
  }

  // The token that a row is of: after the last attention only the wanted ones have rows.
  int64_t token_of(int64_t row) const { return num_rows_ < args_.num_tokens ? args_.wanted[row] : row; }

  // The quantised rows that a product with `weight` takes.
  QuantizedRows rows_of(float* buffer, const QuantizedWeight& weight) const {
    return quantized_rows(buffer, num_rows_, weight.in_features);
  }

  void quantize(const float* inputs, int64_t input_row, const QuantizedRows& rows, int64_t row) const {
    step_.kernels.quantized->quantize(inputs + input_row * rows.num_groups * kGroup, 0, rows.num_groups, rows, row);
  }

  RmsNormArgs norm_args(const float* inputs, const float* weight, float* out) const {
    RmsNormArgs norm = {};
    norm.inputs = inputs;
    norm.weight = weight;
    norm.out = out;
    norm.size = args_.hidden_size;
    norm.eps = args_.eps;
    norm.element_type = kFloat32;
    return norm;
  }

  // residual += delta, normed by itself first where the family does that; out = norm(residual).
  void add_and_norm(const float* delta_norm, bool adds, const float* weight, float* out, int64_t row) const {
    const RowKernels& kernels = *step_.kernels.rows;
    float* residual = rows_.residual + token_of(row) * args_.hidden_size;
    const float* delta = shared_.delta + row * args_.hidden_size;
    if (delta_norm) {
      kernels.rms_norm(norm_args(delta, delta_norm, normed_), 0);
      delta = normed_;
    }
    RmsNormArgs norm = norm_args(adds ? delta : residual, weight, out);
    if (adds) {
      norm.residual = residual;
      norm.total = residual;
    }
    kernels.rms_norm(norm, 0);
  }

  void norm_and_quantize(const float* delta_norm, bool adds, const float* weight) {
    const QuantizedRows rows = quantized_rows(rows_.quantized, num_rows_, args_.hidden_size);
    for_rows(kNorms, [&](int64_t row) {
      add_and_norm(delta_norm, adds, weight, normed_, row);
      quantize(normed_, 0, rows, row);
    });
  }

  void multiply(const QuantizedWeight& weight, const QuantizedRows& rows, float* out) {
    const PanelTasks tasks(num_rows_, num_panels(weight), args_.num_threads);
    for_each(kProducts, tasks.count, [&](int64_t i) {
      const PanelTask task = tasks[i];
      float* first = out + task.first_row * weight.num_outputs + task.first_panel * kPanel;
      step_.kernels.quantized->multiply(weight, rows, task, first, weight.num_outputs);
    });
  }

  // activation(gate) * up, quantised: each task multiplies some panels of both halves, and their products never leave
  // the cache of its core.
  void gate(const QuantizedWeight& gate_up) {
    const QuantizedRows inputs = rows_of(rows_.quantized, gate_up);
    const QuantizedRows gated = quantized_rows(shared_.gated, num_rows_, args_.intermediate_size);
    const int64_t panels_of_half = args_.intermediate_size / kPanel;
    const PanelTasks tasks(num_rows_, panels_of_half, args_.num_threads);
    for_each(kGatedProducts, tasks.count, [&](int64_t i) {
      PanelTask task = tasks[i];
      const int64_t size = task.num_panels * kPanel, first_group = task.first_panel * kPanel / kGroup;
      float* products = thread_scratch((2 * task.num_rows + 1) * size);
      if (!products) {
        step_.status = kOutOfMemory;
        return;
      }
      step_.kernels.quantized->multiply(gate_up, inputs, task, products, 2 * size);
      task.first_panel += panels_of_half;
      step_.kernels.quantized->multiply(gate_up, inputs, task, products + size, 2 * size);
      GateArgs gate = {};
      gate.out = products + 2 * task.num_rows * size;
      gate.size = size;
      gate.activation = args_.activation;
      gate.element_type = kFloat32;
      for (int64_t row = 0; row < task.num_rows; ++row) {
        gate.gate_up = products + row * 2 * size;
        step_.kernels.rows->gate(gate, 0);
        step_.kernels.quantized->quantize(static_cast<const float*>(gate.out), first_group, size / kGroup, gated,
                                          task.first_row + row);
      }
    });
  }

  void attend(const LayerWeights& layer, const LayerCache& cache) {
    RotateAndWriteArgs write = args_.write;
    write.heads = shared_.heads;
    write.query = shared_.query;
    write.cos = args_.cos[layer.rope];
    write.sin = args_.sin[layer.rope];
    write.norm_weight = layer.head_norm;
    write.key_cache = cache.key;
    write.value_cache = cache.value;
    write.key_scale = cache.key_scale;
    write.value_scale = cache.value_scale;
    for_each(kRotation, args_.num_tokens, [&](int64_t token) {
      float* scratch = thread_scratch(2 * write.head_dim);
      if (scratch) step_.kernels.rows->rotate_and_write(write, token, scratch);
      else step_.status = kOutOfMemory;
    });
    AttendArgs attend = args_.attend;
    attend.query = shared_.query;
    attend.out = shared_.attended;
    attend.key_cache = cache.key;
    attend.value_cache = cache.value;
    attend.key_scale = cache.key_scale;
    attend.value_scale = cache.value_scale;
    attend.sliding_window = layer.sliding_window;
    AttendPlan& plan = layer.sliding_window ? step_.windowed : step_.whole;
    // In the order of the plan, which begins with the longest tasks: no thread has a part of its own.
    step_.team.for_each(loop_, 0, static_cast<int64_t>(plan.tasks.size()), [&](int64_t i) {
      if (const Status failed = run_attend_task(attend, plan, i)) step_.status = failed;
    });
    add_time(kAttention);
  }

  Step& step_;
  const DecoderArgs& args_;
  const SharedBuffers& shared_;
  const RowBuffers rows_;
  float* const normed_;  // [hidden_size], of the row that the thread is at
  const int64_t thread_;
  int64_t num_rows_;
  int64_t loop_ = 0;
  Clock::time_point started_;  // of the part that runs
};

Status run_layers(const DecoderArgs& args) {
  const KernelSet* kernels = kernel_set(args.instruction_set);
  if (!kernels) return kUnsupported;
  for (int64_t token = 0; token < args.num_tokens; ++token)
    if (args.write.slot_mapping[token] >= args.write.num_blocks * args.write.block_size) return kBadSlot;
  Step step(args, *kernels);
  if (const Status failed = step.plan()) return failed;
  static thread_local Scratch kept;
  Carver counter(nullptr);
  SharedBuffers{args, counter};
  const int64_t shared_size = counter.size();
  RowBuffers{args, counter};
  const int64_t rows_size = counter.size() - shared_size;
  const int64_t normed_size = (args.hidden_size + 15) / 16 * 16, normed = shared_size + step.num_row_buffers() * rows_size;
  float* buffer = kept.floats(normed + args.num_threads * normed_size);
  if (!buffer) return kOutOfMemory;
  Carver shared_carver(buffer);
  const SharedBuffers shared(args, shared_carver);
#pragma omp parallel num_threads(args.num_threads)
  {
    const int64_t thread = omp_get_thread_num();
    Carver carver(buffer + shared_size + (step.replicates ? thread * rows_size : 0));
    const RowBuffers rows(args, carver);
    LayerThread(step, shared, rows, buffer + normed + thread * normed_size, thread).run();
  }
  return step.status;
}

}  // namespace
}  // namespace octavo

extern "C" int32_t octavo_run_layers(const octavo::DecoderArgs* args) {
  try {
    return octavo::run_layers(*args);
  } catch (const std::bad_alloc&) {
    return octavo::kOutOfMemory;
  }
}
