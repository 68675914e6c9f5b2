// Entry points of the CPU kernels of attention, called from Python through ctypes and by the native layers: checks, the
// plan and the threads. Knows no arithmetic: the tile kernel of the instruction set that the caller chose does that.
#include "paged_attention.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "attend_plan.h"
#include "model_ops.h"
#include "threads.h"

namespace octavo {
namespace {

constexpr int64_t kMostRowsPerTile = 128;  // enough to make the packing of keys and values cheap beside the products
constexpr int64_t kTasksPerThread = 4;     // enough for threads that others hold up to be helped out

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

struct WeighedTask {
  TileTask task;
  int64_t work;  // estimated, in query rows x visible keys
};

// One task per (row, KV head, query tile) of at most `tokens` tokens, with all the splits of its keys.
std::vector<WeighedTask> whole_tiles(const AttendArgs& args, int64_t tokens) {
  std::vector<WeighedTask> tiles;
  for (int64_t row = 0; row < args.num_rows; ++row) {
    const int64_t begin = args.query_start_loc[row], query_len = args.query_start_loc[row + 1] - begin;
    if (args.seq_lens[row] == 0) continue;
    for (int64_t token = 0; token < query_len; token += tokens) {
      const int64_t num_tokens = std::min(tokens, query_len - token);
      const int64_t position = args.seq_lens[row] - query_len + token, end = position + num_tokens;
      const int64_t first_key = args.sliding_window > 0 ? std::max<int64_t>(0, position + 1 - args.sliding_window) : 0;
      const int64_t first_split = first_key / kKeysPerSplit;
      const int64_t num_splits = (end - 1) / kKeysPerSplit - first_split + 1;
      // Packing a key costs about as much as eight rows of products with it.
      const int64_t work = (num_tokens * (args.num_q_heads / args.num_kv_heads) + 8) * (end - first_key);
      for (int64_t head = 0; head < args.num_kv_heads; ++head)
        tiles.push_back({{row, head, begin + token, num_tokens, position, first_split, num_splits, -1}, work});
    }
  }
  return tiles;
}

// The largest tiles that still give every thread several; how tokens are cut into tiles changes no result.
std::vector<WeighedTask> choose_tiles(const AttendArgs& args) {
  const int64_t group = args.num_q_heads / args.num_kv_heads;
  int64_t tokens = 1;
  while (2 * tokens * group <= kMostRowsPerTile) tokens *= 2;
  std::vector<WeighedTask> tiles = whole_tiles(args, tokens);
  const int64_t wanted = args.num_threads > 1 ? kTasksPerThread * args.num_threads : 1;
  while (static_cast<int64_t>(tiles.size()) < wanted && tokens > 1 && tokens * group > 16) {
    tokens /= 2;
    tiles = whole_tiles(args, tokens);
  }
  return tiles;
}

// Cuts tiles that would keep one thread busy while others wait, between splits of their keys.
std::vector<WeighedTask> share_out(const AttendArgs& args, const std::vector<WeighedTask>& tiles, AttendPlan& plan) {
  int64_t total = 0, num_floats = 0;
  for (const WeighedTask& tile : tiles) total += tile.work;
  const int64_t fair = std::max<int64_t>(1, total / (kTasksPerThread * args.num_threads));
  std::vector<WeighedTask> tasks;
  for (const WeighedTask& tile : tiles) {
    const int64_t num_splits = tile.task.num_splits;
    const int64_t parts = std::min(num_splits, (tile.work + fair - 1) / fair);
    if (args.num_threads == 1 || tile.work <= 2 * fair || parts == 1) {
      tasks.push_back(tile);
      continue;
    }
    TileTask part = tile.task;
    part.merge = static_cast<int64_t>(plan.merges.size());
    for (int64_t i = 0; i < parts; ++i) {
      part.first_split = tile.task.first_split + num_splits * i / parts;
      part.num_splits = tile.task.first_split + num_splits * (i + 1) / parts - part.first_split;
      tasks.push_back({part, tile.work / num_splits * part.num_splits});
    }
    plan.merges.push_back({tile.task, parts, num_floats});
    num_floats += num_splits * split_floats(args, tile.task);
  }
  plan.results.reset(new float[num_floats]);
  plan.unfinished.reset(new std::atomic<int64_t>[plan.merges.size()]);
  return tasks;
}

Status write_kv(const WriteKVArgs& args) {
  for (int64_t token = 0; token < args.num_tokens; ++token)
    if (args.slot_mapping[token] >= args.num_blocks * args.block_size) return kBadSlot;
  const KernelSet* kernels = kernel_set(args.instruction_set);
  if (!kernels) return kUnsupported;
  std::atomic<bool> out_of_memory{false};
  parallel_for_rows(args.num_tokens, 2 * args.num_kv_heads * args.head_dim, args.num_threads, [&](int64_t token) {
    float* scratch = thread_scratch(args.head_dim);
    if (scratch) kernels->rows->write_kv(args, token, scratch);
    else out_of_memory = true;
  });
  return out_of_memory ? kOutOfMemory : kOk;
}

}  // namespace

Status plan_attend(const AttendArgs& args, AttendPlan& plan) {
  for (int64_t row = 0; row < args.num_rows; ++row)
    if (const Status status = check_row(args, row)) return status;
  const KernelSet* kernels = kernel_set(args.instruction_set);
  if (!kernels) return kUnsupported;
  plan.merges.clear();
  std::vector<WeighedTask> tasks = share_out(args, choose_tiles(args), plan);
  std::stable_sort(tasks.begin(), tasks.end(),
                   [](const WeighedTask& a, const WeighedTask& b) { return a.work > b.work; });
  plan.tasks.clear();
  int64_t most_rows = 0;
  for (const WeighedTask& weighed : tasks) {
    plan.tasks.push_back(weighed.task);
    most_rows = std::max(most_rows, tile_rows(args, weighed.task));
  }
  for (size_t i = 0; i < plan.merges.size(); ++i) plan.unfinished[i] = plan.merges[i].num_tasks;
  plan.scratch_floats = kernels->attention->scratch_floats(args, most_rows);
  return kOk;
}

Status run_attend_task(const AttendArgs& args, AttendPlan& plan, int64_t index) {
  const TileKernel* kernel = kernel_set(args.instruction_set)->attention;
  const TileTask& task = plan.tasks[index];
  const int64_t num_tasks = static_cast<int64_t>(plan.tasks.size());
  // While this thread is at its task, the others take one each, and then it is its turn again.
  const TileTask* upcoming = index + args.num_threads < num_tasks ? &plan.tasks[index + args.num_threads] : nullptr;
  float* scratch = thread_scratch(plan.scratch_floats);
  if (task.merge < 0) {
    if (!scratch) return kOutOfMemory;
    kernel->attend_tile(args, task, upcoming, scratch, nullptr);
    return kOk;
  }
  const TileMerge& merge = plan.merges[task.merge];
  float* results = plan.results.get() + merge.results;
  const int64_t skipped = task.first_split - merge.tile.first_split;
  if (scratch) kernel->attend_tile(args, task, upcoming, scratch, results + skipped * split_floats(args, task));
  // Who ends last merges: all results of the tile are there. The counter is left ready for the next layer.
  if (plan.unfinished[task.merge].fetch_sub(1, std::memory_order_acq_rel) == 1) {
    plan.unfinished[task.merge].store(merge.num_tasks, std::memory_order_relaxed);
    if (scratch) kernel->merge_tile(args, merge.tile, merge.tile.num_splits, results, scratch);
  }
  return scratch ? kOk : kOutOfMemory;
}

Status run_attend(const AttendArgs& args, AttendPlan& plan) {
  std::atomic<Status> worst{kOk};
  parallel_for(static_cast<int64_t>(plan.tasks.size()), args.num_threads, [&](int64_t i) {
    if (const Status status = run_attend_task(args, plan, i)) worst = status;
  });
  return worst;
}

}  // namespace octavo

extern "C" {

int32_t octavo_attend(const octavo::AttendArgs* args) {
  try {
    octavo::AttendPlan plan;
    const octavo::Status status = octavo::plan_attend(*args, plan);
    return status ? status : octavo::run_attend(*args, plan);
  } catch (const std::bad_alloc&) {
    return octavo::kOutOfMemory;
  }
}

int32_t octavo_write_kv(const octavo::WriteKVArgs* args) { return octavo::write_kv(*args); }

}  // extern "C"
