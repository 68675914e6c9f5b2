// Entry points of the CPU kernels, called from Python through ctypes: checks, the work list and the threads.
// Knows no arithmetic: the tile kernel of the instruction set that the caller chose does that.
#include "paged_attention.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "threads.h"

namespace octavo {
namespace {

// Every table entry that the row's queries can see names a block of the cache.
Status check_row(const AttendArgs& args, int64_t row) {
  const int64_t begin = args.query_start_loc[row], query_len = args.query_start_loc[row + 1] - begin;
  const int64_t seq_len = args.seq_lens[row];
  if (seq_len == 0) return kOk;  // padding
  if (begin < 0 || query_len < 0 || begin + query_len > args.num_tokens || query_len > seq_len) return kBadRow;
  const int64_t window = args.sliding_window > 0 ? args.sliding_window : seq_len;
  const int64_t first_key = std::max<int64_t>(0, seq_len - query_len + 1 - window);
  const int32_t* table = args.block_tables + row * args.block_tables_stride;
  if (query_len > 0 && (seq_len - 1) / args.block_size >= args.block_tables_width) return kBadRow;
  for (int64_t i = first_key / args.block_size; query_len > 0 && i <= (seq_len - 1) / args.block_size; ++i)
    if (table[i] < 0 || table[i] >= args.num_blocks) return kBadBlockId;
  return kOk;
}

// One task per (row, KV head, query tile), the longest first so that no thread ends alone on one.
std::vector<TileTask> plan(const AttendArgs& args) {
  std::vector<TileTask> tasks;
  const int64_t step = tokens_per_tile(args);
  for (int64_t row = 0; row < args.num_rows; ++row) {
    const int64_t begin = args.query_start_loc[row], query_len = args.query_start_loc[row + 1] - begin;
    if (args.seq_lens[row] == 0) continue;
    for (int64_t token = 0; token < query_len; token += step) {
      const int64_t num_tokens = std::min(step, query_len - token);
      const int64_t position = args.seq_lens[row] - query_len + token;
      int64_t visible = position + num_tokens;
      if (args.sliding_window > 0) visible = std::min(visible, args.sliding_window + num_tokens - 1);
      for (int64_t head = 0; head < args.num_kv_heads; ++head)
        tasks.push_back({row, head, begin + token, num_tokens, position, num_tokens * visible});
    }
  }
  std::stable_sort(tasks.begin(), tasks.end(), [](const TileTask& a, const TileTask& b) { return a.work > b.work; });
  return tasks;
}

Status attend(const AttendArgs& args) {
  for (int64_t row = 0; row < args.num_rows; ++row)
    if (const Status status = check_row(args, row)) return status;
  const KernelSet* kernels = kernel_set(args.instruction_set);
  if (!kernels) return kUnsupported;
  const TileKernel* kernel = kernels->attention;
  const int64_t floats = kernel->scratch_floats(args);
  const std::vector<TileTask> tasks = plan(args);
  std::atomic<bool> out_of_memory{false};
  parallel_for(static_cast<int64_t>(tasks.size()), args.num_threads, [&](int64_t i) {
    float* scratch = thread_scratch(floats);
    if (scratch) kernel->attend_tile(args, tasks[i], scratch);
    else out_of_memory = true;
  });
  return out_of_memory ? kOutOfMemory : kOk;
}

Status write_kv(const WriteKVArgs& args) {
  for (int64_t token = 0; token < args.num_tokens; ++token)
    if (args.slot_mapping[token] >= args.num_blocks * args.block_size) return kBadSlot;
  const int64_t size = args.element_size;
  const auto copy = [&](const void* source, const int64_t* ss, void* target, const int64_t* ts, int64_t token,
                        int64_t slot) {
    const char* from = static_cast<const char*>(source) + token * ss[0] * size;
    char* to = static_cast<char*>(target) + (slot / args.block_size * ts[0] + slot % args.block_size * ts[2]) * size;
    for (int64_t head = 0; head < args.num_kv_heads; ++head)
      std::memcpy(to + head * ts[1] * size, from + head * ss[1] * size, args.head_dim * size);
  };
  constexpr int64_t tokens_per_chunk = 64;  // fewer are not worth waking a thread
  const int64_t num_chunks = (args.num_tokens + tokens_per_chunk - 1) / tokens_per_chunk;
  parallel_for(num_chunks, args.num_threads, [&](int64_t chunk) {
    const int64_t end = std::min(args.num_tokens, (chunk + 1) * tokens_per_chunk);
    for (int64_t token = chunk * tokens_per_chunk; token < end; ++token) {
      const int64_t slot = args.slot_mapping[token];
      if (slot < 0) continue;
      copy(args.key, args.key_strides, args.key_cache, args.key_cache_strides, token, slot);
      copy(args.value, args.value_strides, args.value_cache, args.value_cache_strides, token, slot);
    }
  });
  return kOk;
}

}  // namespace
}  // namespace octavo

extern "C" {

int32_t octavo_attend(const octavo::AttendArgs* args) {
  try {
    return octavo::attend(*args);
  } catch (const std::bad_alloc&) {
    return octavo::kOutOfMemory;
  }
}

int32_t octavo_write_kv(const octavo::WriteKVArgs* args) { return octavo::write_kv(*args); }

}  // extern "C"
