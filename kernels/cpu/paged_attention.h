// The types that cross between the entry points of attention (paged_attention.cpp), the tile kernel (attention_tile.cpp,
// compiled once per instruction set) and Python (native_library.py mirrors the two argument structs field by field).
// Knows no torch: pointers, strides in elements, and plain integers.
#pragma once

#include <cstdint>

#include "native.h"

namespace octavo {

constexpr int64_t kKeysPerTile = 64;
// Keys that are attended by themselves, from a multiple of this position on, before their results are merged in order:
// so a token's output does not depend on which threads shared its keys.
constexpr int64_t kKeysPerSplit = 4 * kKeysPerTile;

struct WriteKVArgs {
  const void* key;    // [num_tokens, num_kv_heads, head_dim], head_dim contiguous
  const void* value;  // [num_tokens, num_kv_heads, head_dim], head_dim contiguous
  void* key_cache;    // [num_blocks, num_kv_heads, block_size, head_dim], head_dim contiguous
  void* value_cache;
  float* key_scale;  // [num_blocks, num_kv_heads, block_size] of an int8 or float8 cache, else null
  float* value_scale;
  const int64_t* slot_mapping;  // [num_tokens], -1 = not written
  int64_t num_tokens, num_kv_heads, head_dim, num_blocks, block_size;
  int64_t key_strides[2], value_strides[2];              // token, head
  int64_t key_cache_strides[3], value_cache_strides[3];  // block, head, slot
  int64_t key_scale_strides[3], value_scale_strides[3];  // the same
  int32_t source_type, cache_type, instruction_set, num_threads;
};

struct AttendArgs {
  const void* query;            // [num_tokens, num_q_heads, head_dim], head_dim contiguous
  void* out;                    // [num_tokens, num_q_heads, head_dim], contiguous; tokens of no row are left alone
  const void* key_cache;        // [num_blocks, num_kv_heads, block_size, head_dim], head_dim contiguous
  const void* value_cache;
  const float* key_scale;  // [num_blocks, num_kv_heads, block_size] of an int8 or float8 cache, else null
  const float* value_scale;
  const int32_t* query_start_loc;  // [num_rows + 1]
  const int32_t* seq_lens;         // [num_rows]
  const int32_t* block_tables;     // [num_rows, >= max blocks of a row]
  int64_t num_rows, num_tokens, num_q_heads, num_kv_heads, head_dim, num_blocks, block_size;
  int64_t block_tables_width, block_tables_stride;
  int64_t query_strides[2];                              // token, head
  int64_t key_cache_strides[3], value_cache_strides[3];  // block, head, slot
  int64_t key_scale_strides[3], value_scale_strides[3];  // the same
  float scale, logit_softcap;  // logit_softcap 0 = none
  int64_t sliding_window;      // 0 = none
  // A bfloat16 query over a bfloat16, int8 or float8 cache is multiplied in bfloat16 where the instruction set has that.
  int32_t query_type, out_type, cache_type, instruction_set, num_threads;
};

// Consecutive query tokens of one row with all query heads of one KV head, over some splits of the keys they see.
struct TileTask {
  int64_t row, kv_head;
  int64_t first_token;     // index into query
  int64_t num_tokens;
  int64_t first_position;  // of first_token in its own sequence
  int64_t first_split, num_splits;
  int64_t merge;  // index of the tile's TileMerge in the plan; -1 where the task has all of the tile's keys
};

// Rows of a tile (token, then query head of the group), and the floats that their results over one split take.
inline int64_t tile_rows(const AttendArgs& args, const TileTask& task) {
  return task.num_tokens * (args.num_q_heads / args.num_kv_heads);
}
inline int64_t padded_head_dim(const AttendArgs& args) { return (args.head_dim + 15) / 16 * 16; }
inline int64_t split_floats(const AttendArgs& args, const TileTask& task) {
  return tile_rows(args, task) * (padded_head_dim(args) + 2);
}

struct TileKernel {
  // Attends to the task's keys. Writes the output where the task has all keys of its tile, else the results of each
  // split to `results`, split_floats for each. Fetches the first keys of `upcoming` into the processor's caches, a task
  // that the thread may take next, or null.
  void (*attend_tile)(const AttendArgs& args, const TileTask& task, const TileTask* upcoming, float* scratch,
                      float* results);
  // Merges the results of `num_splits` splits of a tile, in order, and writes its output.
  void (*merge_tile)(const AttendArgs& args, const TileTask& task, int64_t num_splits, const float* results,
                     float* scratch);
  // Floats that one thread needs for tiles of so many rows, at a 64-byte boundary.
  int64_t (*scratch_floats)(const AttendArgs& args, int64_t num_rows);
};

namespace generic { extern const TileKernel kTileKernel; }
namespace avx2 { extern const TileKernel kTileKernel; }
namespace avx512 { extern const TileKernel kTileKernel; }
namespace avx512_bf16 { extern const TileKernel kTileKernel; }

}  // namespace octavo
