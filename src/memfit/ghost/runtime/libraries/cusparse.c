/* cuSPARSE: matrices that remember their shape, sizes of workspace, and results whose size depends on
 * values. cuSPARSELt, the library of matrices with two zeros in four, is a gap (gaps.txt).
 *
 * The number of entries of a sparse product or sum depends on the positions of its operands' entries,
 * which are unknown here: the ghost reports the most that there can be. NVIDIA documents no sizes of
 * workspace; one index for each row and each entry is assumed throughout. Both are recorded as assumed.
 */
#include "core/ghost.h"

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

/* ---- Matrices -------------------------------------------------------------------------------- */

struct sparse_matrix {
    int64_t rows, columns, entries;
};

static status new_matrix(void **out, struct sparse_matrix matrix)
{
    status result = ghost_new_handle(out, sizeof matrix);
    if (result == SUCCESS)
        *(struct sparse_matrix *)*out = matrix;
    return result;
}

CALL(cusparseCreateCsr(void **matrix, int64_t rows, int64_t columns, int64_t entries, void *offsets,
                       void *indices, void *values, int offsets_type, int indices_type, int base,
                       int value_type),
     new_matrix(matrix, (struct sparse_matrix){rows, columns, entries}))
CALL(cusparseCreateCoo(void **matrix, int64_t rows, int64_t columns, int64_t entries, void *row_indices,
                       void *column_indices, void *values, int index_type, int base, int value_type),
     new_matrix(matrix, (struct sparse_matrix){rows, columns, entries}))
CALL(cusparseCreateDnMat(void **matrix, int64_t rows, int64_t columns, int64_t step, void *values,
                         int value_type, int order),
     ghost_new_handle(matrix, 64))
CALL(cusparseCreateDnVec(void **vector, int64_t size, void *values, int value_type),
     ghost_new_handle(vector, 64))
ENTRY(cusparseDestroySpMat(void *matrix), free(matrix))
ALSO(cusparseDestroyDnMat, cusparseDestroySpMat)
ALSO(cusparseDestroyDnVec, cusparseDestroySpMat)

API status cusparseSpMatGetSize(const struct sparse_matrix *matrix, int64_t *rows, int64_t *columns,
                                int64_t *entries)
{
    *rows = matrix->rows;
    *columns = matrix->columns;
    *entries = matrix->entries;
    return SUCCESS;
}

/* ---- Workspace ------------------------------------------------------------------------------ */

/* In bytes; a size that overflows is reported as more than any device has. */
static size_t work_size(int64_t rows, int64_t entries)
{
    size_t indices, bytes;
    ghost_assumed("cuSPARSE workspace, as large as one index per row and entry");
    if (__builtin_add_overflow(rows, entries, &indices) ||
        __builtin_mul_overflow(indices, sizeof(int32_t), &bytes))
        return SIZE_MAX / 2;
    return bytes;
}

ENTRY(cusparseSpMM_bufferSize(void *handle, int a_operation, int b_operation, const void *alpha,
                              const struct sparse_matrix *a, void *b, const void *beta, void *c,
                              int compute_type, int algorithm, size_t *size),
      *size = work_size(a->rows, a->entries))
ENTRY(cusparseSpMV_bufferSize(void *handle, int operation, const void *alpha, const struct sparse_matrix *a,
                              void *x, const void *beta, void *y, int compute_type, int algorithm,
                              size_t *size),
      *size = work_size(a->rows, a->entries))
ENTRY(cusparseSDDMM_bufferSize(void *handle, int a_operation, int b_operation, const void *alpha, void *a,
                               void *b, const void *beta, const struct sparse_matrix *c, int compute_type,
                               int algorithm, size_t *size),
      *size = work_size(c->rows, c->entries))
ENTRY(cusparseSpSM_bufferSize(void *handle, int a_operation, int b_operation, const void *alpha,
                              const struct sparse_matrix *a, void *b, void *c, int compute_type,
                              int algorithm, void *solver, size_t *size),
      *size = work_size(a->rows, a->entries))
ENTRY(cusparseSpSV_bufferSize(void *handle, int operation, const void *alpha, const struct sparse_matrix *a,
                              void *x, void *y, int compute_type, int algorithm, void *solver, size_t *size),
      *size = work_size(a->rows, a->entries))
ENTRY(cusparseXcsrsort_bufferSizeExt(void *handle, int rows, int columns, int entries, const int *offsets,
                                     const int *indices, size_t *size),
      *size = work_size(rows, entries))
ALSO(cusparseXcoosort_bufferSizeExt, cusparseXcsrsort_bufferSizeExt)

/* The older solvers for matrices of blocks, once per type. */
#define BLOCKS(T)                                                                                            \
    ENTRY(cusparse##T##bsrsv2_bufferSize(void *handle, int direction, int operation, int rows, int entries,  \
                                         void *type, void *values, const int *offsets, const int *indices,   \
                                         int block, void *solver, int *size),                                \
          *size = (int)work_size(rows, entries))                                                             \
    ENTRY(cusparse##T##bsrsm2_bufferSize(void *handle, int direction, int a_operation, int b_operation,      \
                                         int rows, int columns, int entries, void *type, void *values,       \
                                         const int *offsets, const int *indices, int block, void *solver,    \
                                         int *size),                                                         \
          *size = (int)work_size(rows, entries))                                                             \
    ENTRY(cusparse##T##csrgeam2_bufferSizeExt(                                                               \
              void *handle, int rows, int columns, const void *alpha, void *a_type, int a_entries,           \
              const void *a_values, const int *a_offsets, const int *a_indices, const void *beta,            \
              void *b_type, int b_entries, const void *b_values, const int *b_offsets, const int *b_indices, \
              void *c_type, const void *c_values, const int *c_offsets, const int *c_indices, size_t *size), \
          *size = work_size(rows, (int64_t)a_entries + b_entries))

BLOCKS(S)
BLOCKS(D)
BLOCKS(C)
BLOCKS(Z)

/* No pivot is zero: the matrices of systems are assumed to be regular. */
ENTRY(cusparseXbsrsv2_zeroPivot(void *handle, void *solver, int *position), *position = -1)
ALSO(cusparseXbsrsm2_zeroPivot, cusparseXbsrsv2_zeroPivot)

/* ---- Results whose size depends on the positions of entries ---------------------------------- */

/* At most `entries`, and at most the number of elements of the matrix. */
static int64_t entries_within(int64_t entries, int64_t rows, int64_t columns)
{
    ghost_assumed("number of entries in a sparse product or sum, the largest possible");
    int64_t places, most = __builtin_mul_overflow(rows, columns, &places) ? INT64_MAX : places;
    return entries < most ? entries : most;
}

/* A sum C = A + B: at most the entries of both. The count goes to the host or the device. */
API status cusparseXcsrgeam2Nnz(void *handle, int rows, int columns, void *a_type, int a_entries,
                                const int *a_offsets, const int *a_indices, void *b_type, int b_entries,
                                const int *b_offsets, const int *b_indices, void *c_type, int *c_offsets,
                                int *count, void *work)
{
    forget_everything();
    if (!is_device_address(count))
        *count = (int)entries_within((int64_t)a_entries + b_entries, rows, columns);
    return SUCCESS;
}

/* A product C = A B, in two steps; each is first called for its workspace, with a null `work`. An entry of A
 * is multiplied with at most a row of B. */
static int64_t product_entries(const struct sparse_matrix *a, const struct sparse_matrix *b)
{
    int64_t each = b->columns < b->entries ? b->columns : b->entries, entries;
    if (__builtin_mul_overflow(a->entries, each, &entries))
        entries = INT64_MAX;
    return entries_within(entries, a->rows, b->columns);
}

API status cusparseSpGEMM_workEstimation(void *handle, int a_operation, int b_operation, const void *alpha,
                                         const struct sparse_matrix *a, const struct sparse_matrix *b,
                                         const void *beta, void *c, int compute_type, int algorithm,
                                         void *product, size_t *size, void *work)
{
    if (work)
        forget_everything();
    else
        *size = work_size(a->rows, a->entries);
    return SUCCESS;
}

API status cusparseSpGEMM_compute(void *handle, int a_operation, int b_operation, const void *alpha,
                                  const struct sparse_matrix *a, const struct sparse_matrix *b,
                                  const void *beta, struct sparse_matrix *c, int compute_type, int algorithm,
                                  void *product, size_t *size, void *work)
{
    if (work)
        forget_everything();
    else
        *size = work_size(a->rows, product_entries(a, b));
    c->entries = product_entries(a, b);
    return SUCCESS;
}
