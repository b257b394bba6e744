/* How a GPU's memory is used, for reports and for the out-of-memory message. */

#include <stdio.h>

#include "cuda_heaps.h"
#include "units.h"

void gpu_usage_count(int device, const range *arena, gpu_usage *out)
{
    const gpu *g = gpu_known(device);
    if (!g)
        return;
    out->pages = g->pages * g->page_bytes;
    out->spare = (int64_t)g->spare.count * g->page_bytes;
    out->most_pages = g->most_pages * g->page_bytes;
    out->arena = arena->gpu == g ? arena->mapped * g->page_bytes : 0;
    heap *h;
    for (int64_t i = 0; (h = heap_at(i)); i++) {
        if (h->range.gpu != g)
            continue;
        out->heaps += h->range.mapped * g->page_bytes;
        out->in_heaps += h->live;
    }
}

void describe_out_of_memory(char *out, size_t room, int64_t size, int device, const range *arena)
{
    static const double mib = MIB;
    size_t left = 0, total = 0;
    gpu_usage f = {0};
    gpu_usage_count(device, arena, &f);
    cuda_driver()->MemGetInfo(&left, &total);
    const gpu *g = gpu_known(device);
    int is_limited = g && g->allowed_pages != INT64_MAX;
    snprintf(out, room,
             "CUDA out of memory. Tried to allocate %.2f MiB. GPU %d has a total capacity of %.2f MiB of "
             "which %.2f MiB is free. memfit.arena holds %.2f MiB for its plan and %.2f MiB for other "
             "allocations, of which %.2f MiB is in use. %s%s",
             (double)size / mib, device, (double)total / mib, (double)left / mib, (double)f.arena / mib,
             (double)f.heaps / mib, (double)f.in_heaps / mib,
             captures_open() ? "A CUDA graph is being captured, so unused memory could not be released."
                             : "All unused memory was released first.",
             is_limited ? " The process is limited by torch.cuda.set_per_process_memory_fraction." : "");
}
