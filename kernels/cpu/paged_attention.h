// The types that cross between the entry points (paged_attention.cpp), the tile kernel (attention_tile.cpp, compiled
// once per instruction set) and Python (native_library.py mirrors the two argument structs field by field).
// Knows no torch: pointers, strides in elements, and plain integers.
#pragma once

#include <cstdint>

#include "native.h"

namespace octavo {

constexpr int64_t kKeysPerTile = 64;
constexpr int64_t kQueryRowsPerTile = 32;  // query tokens x query heads of one KV head

struct WriteKVArgs {
  const void* key;    // [num_tokens, num_kv_heads, head_dim], head_dim contiguous
  const void* value;  // [num_tokens, num_kv_heads, head_dim], head_dim contiguous
  void* key_cache;    // [num_blocks, num_kv_heads, block_size, head_dim], head_dim contiguous
  void* value_cache;
  const int64_t* slot_mapping;  // [num_tokens], -1 = not written
  int64_t num_tokens, num_kv_heads, head_dim, num_blocks, block_size, element_size;
  int64_t key_strides[2], value_strides[2];              // token, head
  int64_t key_cache_strides[3], value_cache_strides[3];  // block, head, slot
  int32_t num_threads;
};

struct AttendArgs {
  const void* query;            // [num_tokens, num_q_heads, head_dim], head_dim contiguous
  void* out;                    // [num_tokens, num_q_heads, head_dim], contiguous
  const void* key_cache;        // [num_blocks, num_kv_heads, block_size, head_dim], head_dim contiguous
  const void* value_cache;
  const int32_t* query_start_loc;  // [num_rows + 1]
  const int32_t* seq_lens;         // [num_rows]
  const int32_t* block_tables;     // [num_rows, >= max blocks of a row]
  int64_t num_rows, num_tokens, num_q_heads, num_kv_heads, head_dim, num_blocks, block_size;
  int64_t block_tables_width, block_tables_stride;
  int64_t query_strides[2];                              // token, head
  int64_t key_cache_strides[3], value_cache_strides[3];  // block, head, slot
  float scale, logit_softcap;  // logit_softcap 0 = none
  int64_t sliding_window;      // 0 = none
  int32_t query_type, cache_type, instruction_set, num_threads;
};

// Consecutive query tokens of one row, with all query heads of one KV head.
struct TileTask {
  int64_t row, kv_head;
  int64_t first_token;     // index into query
  int64_t num_tokens;
  int64_t first_position;  // of first_token in its own sequence
  int64_t work;            // estimated, in query tokens x visible keys
};

using AttendTile = void (*)(const AttendArgs& args, const TileTask& task, float* scratch);
using ScratchFloats = int64_t (*)(const AttendArgs& args);

struct TileKernel {
  AttendTile attend_tile;
  ScratchFloats scratch_floats;  // floats that one thread needs, at a 64-byte boundary
};

inline int64_t tokens_per_tile(const AttendArgs& args) {
  const int64_t group = args.num_q_heads / args.num_kv_heads;
  return group >= kQueryRowsPerTile ? 1 : kQueryRowsPerTile / group;
}

namespace generic { extern const TileKernel kTileKernel; }
namespace avx2 { extern const TileKernel kTileKernel; }
namespace avx512 { extern const TileKernel kTileKernel; }
namespace avx512_bf16 { extern const TileKernel kTileKernel; }

}  // namespace octavo
