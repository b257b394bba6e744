/* cuFFT: plans and the size of their work area. cuRAND is only linked to: PyTorch's
 * generators are its own kernels.
 */
#include "core/ghost.h"

/* Plans are small integers without state. */
API status cufftCreate(int *plan)
{
    static int last;
    *plan = __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
    return SUCCESS;
}

/* The work area is assumed to hold the transform's complex data once: a transform of several passes
 * writes its intermediate result there. The cuFFT documentation (13.0, "cuFFT plans") gives only a
 * worst case, of eight such copies, and states that the size depends on the plan. */
API status cufftXtMakePlanMany(int plan, int rank, long long *sizes, long long *in_embed, long long in_step,
                               long long in_distance, int in_type, long long *out_embed, long long out_step,
                               long long out_distance, int out_type, long long batch, size_t *work_size,
                               int execution_type)
{
    ghost_assumed("cuFFT work area, as large as the transform's complex data");
    bool real = in_type != out_type;
    size_t elements = (size_t)batch;
    for (int i = 0; i < rank; i++) {
        bool halved = real && i == rank - 1; /* the other half is the conjugate of this one */
        elements *= (size_t)(halved ? sizes[i] / 2 + 1 : sizes[i]);
    }
    if (work_size)
        *work_size = elements * data_type_width(execution_type);
    return SUCCESS;
}
