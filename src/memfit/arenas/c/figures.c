// What is used of a GPU, for reports and for the message where memory runs out.

#include <stdio.h>

#include "heap.h"

void figures_count(int device, const range *arena, cuda_figures *out) {
  const gpu *g = gpu_known(device);
  if (!g) return;
  out->pages = g->pages * g->page_bytes;
  out->spare = g->spare_count * g->page_bytes;
  out->most_pages = g->most_pages * g->page_bytes;
  out->arena = arena->gpu == g ? arena->mapped * g->page_bytes : 0;
  heap *h;
  for (int64_t i = 0; (h = heap_at(i)); i++) {
    if (h->range.gpu != g) continue;
    out->heaps += h->range.mapped * g->page_bytes;
    out->in_heaps += h->live;
  }
}

void shortage_tell(char *out, size_t room, int64_t size, int device, const range *arena) {
  static const double MIB = 1 << 20;
  size_t left = 0, total = 0;
  cuda_figures f = {0};
  figures_count(device, arena, &f);
  cuda_driver()->MemGetInfo(&left, &total);
  const gpu *g = gpu_known(device);
  int is_limited = g && g->allowed_pages != INT64_MAX;
  snprintf(out, room,
           "CUDA out of memory. Tried to allocate %.2f MiB. GPU %d has a total capacity of %.2f MiB of which %.2f MiB "
           "is free. memfit.arena holds %.2f MiB for its plan and %.2f MiB for all else, of which %.2f MiB is in use. "
           "%s%s",
           (double)size / MIB, device, (double)total / MIB, (double)left / MIB, (double)f.arena / MIB,
           (double)f.heaps / MIB, (double)f.in_heaps / MIB,
           captures_open() ? "A CUDA graph is being captured, so free memory could not be regained."
                      : "All that could be regained was.",
           is_limited ? " The process is limited by torch.cuda.set_per_process_memory_fraction." : "");
}
