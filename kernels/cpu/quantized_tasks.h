// How a product with a quantised weight is cut into tasks, and where its quantised rows lie in scratch. Included by
// entry points alone, which are compiled once. Knows no arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>

#include "quantized.h"

namespace octavo {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The tasks of one product: those of the same rows follow one another, so that a thread that takes a part of them has
// the rows of its neighbours' inputs and outputs to itself.
struct PanelTasks {
  static constexpr int64_t kMostRows = 16 * kRowTile;
  static constexpr int64_t kLeastRows = 6 * kRowTile;  // of a thread: fewer do not pay for reading the weight once more
  static constexpr int64_t kMostPanels = 8;            // at once; of 1,536 inputs in 4 bits: 120 KiB
  static constexpr int64_t kTasksPerThread = 6;        // enough for threads that others hold up to be helped out

  int64_t num_rows, num_panels, rows_per_task, step, tasks_of_rows, count;

  PanelTasks(int64_t rows, int64_t panels, int64_t num_threads) : num_rows(rows), num_panels(panels) {
    const int64_t parts = std::min(num_threads, std::max<int64_t>(1, rows / kLeastRows));
    const int64_t row_tiles = parts * std::max<int64_t>(1, ceil_div(rows, parts * kMostRows));
    rows_per_task = std::max<int64_t>(1, ceil_div(rows, row_tiles * kRowTile)) * kRowTile;
    const int64_t wanted = ceil_div(kTasksPerThread * num_threads, row_tiles);
    step = std::clamp<int64_t>(num_panels / wanted / 2 * 2, 2, kMostPanels);
    tasks_of_rows = ceil_div(num_panels, step);
    count = ceil_div(rows, rows_per_task) * tasks_of_rows;
  }

  PanelTask operator[](int64_t i) const {
    const int64_t row = i / tasks_of_rows * rows_per_task, panel = i % tasks_of_rows * step;
    return {row, std::min(rows_per_task, num_rows - row), panel, std::min(step, num_panels - panel)};
  }
};

inline int64_t num_panels(const QuantizedWeight& weight) { return ceil_div(weight.num_outputs, kPanel); }

inline int64_t quantized_rows_floats(int64_t num_rows, int64_t in_features) {
  return num_rows * (in_features / 4 + 3 * (in_features / kGroup));
}

inline QuantizedRows quantized_rows(float* base, int64_t num_rows, int64_t in_features) {
  const int64_t num_groups = in_features / kGroup, num_places = num_rows * num_groups;
  return {reinterpret_cast<int8_t*>(base + 3 * num_places), base, base + num_places,
          reinterpret_cast<int32_t*>(base + 2 * num_places), num_rows, num_groups};
}

}  // namespace octavo
