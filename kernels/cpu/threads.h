// The threads of one call and their scratch memory. Included by entry points alone, which are compiled once: kernels
// of an instruction set know no threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace octavo {

// Scratch of one thread, kept between calls: a fresh allocation of this size would fault its pages in every time.
// Null where the memory cannot be had.
inline float* thread_scratch(int64_t floats) {
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<float, Free> buffer;
  thread_local int64_t capacity = 0;
  if (floats > capacity) {
    const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + 63) / 64 * 64;
    buffer.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
    capacity = buffer ? floats : 0;
  }
  return buffer.get();
}

// Runs body(i) for every i in [0, count) on `num_threads` threads, which take the next index as they get free.
template <typename Body>
void parallel_for(int64_t count, int num_threads, const Body& body) {
  if (count <= 1 || num_threads <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::atomic<int64_t> next{0};
  // Always the whole team: libgomp ends the threads that a smaller one leaves over, and their scratch with them.
#pragma omp parallel num_threads(num_threads)
  for (int64_t i = next++; i < count; i = next++) body(i);
}

// Runs body(row) for every row, in chunks worth waking a thread for; `row_size` is the work of one row in elements.
template <typename Body>
void parallel_for_rows(int64_t num_rows, int64_t row_size, int num_threads, const Body& body) {
  constexpr int64_t elements_per_chunk = 16384;
  const int64_t rows_per_chunk = std::max<int64_t>(1, elements_per_chunk / std::max<int64_t>(1, row_size));
  parallel_for((num_rows + rows_per_chunk - 1) / rows_per_chunk, num_threads, [&](int64_t chunk) {
    const int64_t end = std::min(num_rows, (chunk + 1) * rows_per_chunk);
    for (int64_t row = chunk * rows_per_chunk; row < end; ++row) body(row);
  });
}

}  // namespace octavo
