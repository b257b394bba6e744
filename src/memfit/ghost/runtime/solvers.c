/* cuSOLVER, cuSPARSE, cuSPARSELt and cuFFT: handles and descriptors. cuRAND is only linked to:
 * PyTorch's generators are its own kernels.
 *
 * The sizes of their work buffers are formulas inside the libraries. A call that asks for one is a
 * gap (gaps.txt), except for cuFFT plans, whose answer of 0 is recorded as assumed.
 */
#include "ghost.h"

#include <stdlib.h>
#include <string.h>

/* A handle or descriptor that only ever goes back in, and how it is destroyed. */
#define OPAQUE(create, destroy)                                                                              \
    API status create(void **handle) { return ghost_new_handle(handle, 64); }                                \
    API status destroy(void *handle)                                                                         \
    {                                                                                                        \
        free(handle);                                                                                        \
        return SUCCESS;                                                                                      \
    }

OPAQUE(cusolverDnCreate, cusolverDnDestroy)
OPAQUE(cusolverDnCreateParams, cusolverDnDestroyParams)
OPAQUE(cusolverDnCreateGesvdjInfo, cusolverDnDestroyGesvdjInfo)
OPAQUE(cusolverDnCreateSyevjInfo, cusolverDnDestroySyevjInfo)
OPAQUE(cusparseCreate, cusparseDestroy)
OPAQUE(cusparseCreateMatDescr, cusparseDestroyMatDescr)
OPAQUE(cusparseCreateBsrsm2Info, cusparseDestroyBsrsm2Info)
OPAQUE(cusparseCreateBsrsv2Info, cusparseDestroyBsrsv2Info)
OPAQUE(cusparseSpGEMM_createDescr, cusparseSpGEMM_destroyDescr)
OPAQUE(cusparseSpSM_createDescr, cusparseSpSM_destroyDescr)
OPAQUE(cusparseSpSV_createDescr, cusparseSpSV_destroyDescr)

API const char *cusparseGetErrorString(int error)
{
    return error == SUCCESS ? "success" : "not supported by memfit's ghost";
}

/* ---- cuSPARSE matrices ----------------------------------------------------------------------- */

API status cusparseCreateCsr(void **matrix, int64_t rows, int64_t columns, int64_t entries, void *offsets,
                             void *indices, void *values, int offsets_type, int indices_type, int base,
                             int value_type)
{
    return ghost_new_handle(matrix, 64);
}

API status cusparseCreateCoo(void **matrix, int64_t rows, int64_t columns, int64_t entries, void *row_indices,
                             void *column_indices, void *values, int index_type, int base, int value_type)
{
    return ghost_new_handle(matrix, 64);
}

API status cusparseCreateDnMat(void **matrix, int64_t rows, int64_t columns, int64_t step, void *values,
                               int value_type, int order)
{
    return ghost_new_handle(matrix, 64);
}

API status cusparseCreateDnVec(void **vector, int64_t size, void *values, int value_type)
{
    return ghost_new_handle(vector, 64);
}

API status cusparseDestroySpMat(void *matrix)
{
    free(matrix);
    return SUCCESS;
}

API status cusparseDestroyDnMat(void *matrix) { return cusparseDestroySpMat(matrix); }
API status cusparseDestroyDnVec(void *vector) { return cusparseDestroySpMat(vector); }

/* ---- cuFFT ----------------------------------------------------------------------------------- */

/* Plans are small integers; the ghost has nothing to keep of them. */
API status cufftCreate(int *plan)
{
    static int last;
    *plan = __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
    return SUCCESS;
}

API status cufftXtMakePlanMany(int plan, int rank, long long *sizes, long long *in_embed, long long in_step,
                               long long in_distance, int in_type, long long *out_embed, long long out_step,
                               long long out_distance, int out_type, long long batch, size_t *work_size,
                               int execution_type)
{
    ghost_assumed("cuFFT work area size");
    if (work_size)
        *work_size = 0;
    return SUCCESS;
}
