// The work of one attention call cut into tasks, once for all layers that share a sliding window. Included by entry
// points and by the native layers, which are compiled once. Knows no arithmetic.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "paged_attention.h"

namespace octavo {

// A tile whose keys several tasks share.
struct TileMerge {
  TileTask tile;      // with all of its splits
  int64_t num_tasks;
  int64_t results;    // where the results of the first split begin, in floats
};

// What `plan_attend` leaves for `run_attend`. Not to be used by two calls at once.
struct AttendPlan {
  std::vector<TileTask> tasks;  // the longest first, so that no thread ends alone on one
  std::vector<TileMerge> merges;
  std::unique_ptr<std::atomic<int64_t>[]> unfinished;  // [merges], tasks that have not ended
  std::unique_ptr<float[]> results;                    // of the tiles of `merges`, split by split
  int64_t scratch_floats = 0;                          // of each thread
};

// Checks the rows and their block tables and fills in the plan. It holds for every call with the same rows, tables,
// heads, types, window, instruction set and threads, whatever its query, output and cache: for every layer of a step
// with the same sliding window. kBadRow and kBadBlockId say that the metadata do not fit the cache; may throw
// std::bad_alloc.
Status plan_attend(const AttendArgs& args, AttendPlan& plan);

// Attends as planned, on args.num_threads threads.
Status run_attend(const AttendArgs& args, AttendPlan& plan);

// One task of the plan, for callers with threads of their own: every index in [0, tasks.size()) once, in any order and
// on any thread. kOutOfMemory where the thread's scratch memory cannot be had.
Status run_attend_task(const AttendArgs& args, AttendPlan& plan, int64_t index);

}  // namespace octavo
