/* cuDNN's graph API: how PyTorch runs convolutions (with bias and activation) and attention.
 *
 *   tensors, convolution ──> operations ──> operation graph ──> heuristics, engine ──> engine
 *   configuration ──> execution plan ──> its workspace's size; execute with a variant pack
 *
 * What a descriptor says is copied into each that is made from it, so none can outlive another. The
 * heuristics answer with two configurations, whatever is asked: one whose workspace is asked about the
 * whole operation, and one without a workspace, which PyTorch falls back on when the first's cannot be
 * allocated. (Convolutions always have one: CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM and the two
 * gradients' ALGO_0 are documented to need none.)
 */
#include "cudnn.h"

#include <stdlib.h>
#include <string.h>

/* Source: cudnn_graph.h 9.24; the numbers have not moved since cuDNN 9.0. */
enum attribute_type {
    TYPE_DATA_TYPE = 1,
    TYPE_INT64 = 3,
    TYPE_VOID_PTR = 6,
    TYPE_BACKEND_DESCRIPTOR = 15,
    TYPE_INT32 = 23,
};
enum descriptor_type {
    OPERATION_CONVOLUTION_FORWARD = 10,
    OPERATION_CONVOLUTION_BACKWARD_FILTER = 11,
    OPERATION_CONVOLUTION_BACKWARD_DATA = 12,
};
enum attribute_name {
    CONVOLUTION_COMPUTE_TYPE = 100,
    CONVOLUTION_DILATIONS = 102,
    CONVOLUTION_FILTER_STRIDES = 103,
    CONVOLUTION_PRE_PADDINGS = 105,
    CONVOLUTION_SPATIAL_DIMENSIONS = 106,
    ENGINEHEUR_OPERATION_GRAPH = 201,
    ENGINEHEUR_RESULTS = 202,
    ENGINECFG_ENGINE = 300,
    ENGINECFG_KNOB_CHOICES = 302,
    ENGINECFG_WORKSPACE_SIZE = 303,
    EXECUTION_PLAN_ENGINE_CONFIG = 401,
    EXECUTION_PLAN_WORKSPACE_SIZE = 402,
    FORWARD_CONVOLUTION = 702,
    FORWARD_W = 703,
    FORWARD_X = 704,
    FORWARD_Y = 705,
    BACKWARD_DATA_CONVOLUTION = 708,
    BACKWARD_DATA_W = 709,
    BACKWARD_DATA_DX = 710,
    BACKWARD_DATA_DY = 711,
    BACKWARD_FILTER_CONVOLUTION = 714,
    BACKWARD_FILTER_DW = 715,
    BACKWARD_FILTER_X = 716,
    BACKWARD_FILTER_DY = 717,
    OPERATIONGRAPH_OPERATIONS = 801,
    TENSOR_DATA_TYPE = 901,
    TENSOR_DIMENSIONS = 902,
    TENSOR_STRIDES = 903,
    VARIANT_PACK_WORKSPACE = 1003,
    ENGINE_OPERATION_GRAPH = 1300,
};

/* One struct for every type: `type` says which of it means something. */
struct backend_descriptor {
    int type;
    struct tensor tensor;
    struct convolution convolution;
    int operations;      /* of a graph, and of what is made from it */
    bool is_convolution; /* whether one of them is `convolution` */
    bool is_frugal;      /* an engine that is slower and needs no workspace */
    bool is_sized;       /* a plan: whether `workspace_size` was asked for already */
    uint64_t workspace_size;
    void *workspace; /* of a variant pack */
};

API status cudnnBackendCreateDescriptor(int type, void **descriptor)
{
    status result = ghost_new_handle(descriptor, sizeof(struct backend_descriptor));
    if (result == SUCCESS)
        ((struct backend_descriptor *)*descriptor)->type = type;
    return result;
}

API status cudnnBackendDestroyDescriptor(void *descriptor)
{
    free(descriptor);
    return SUCCESS;
}

API status cudnnBackendFinalize(void *descriptor) { return SUCCESS; }

/* ---- What is set ----------------------------------------------------------------------------- */

static void set_numbers(int64_t *to, int *count_to, int64_t count, const int64_t *values)
{
    *count_to = within(count);
    memcpy(to, values, (size_t)*count_to * sizeof *to);
}

/* What an operation is made from: tensors, and the convolution's own numbers. */
static void set_part(struct backend_descriptor *operation, int name, const struct backend_descriptor *part)
{
    struct convolution *convolution = &operation->convolution;
    switch (name) {
    case FORWARD_X:
    case BACKWARD_DATA_DX:
    case BACKWARD_FILTER_X:
        convolution->x = part->tensor;
        break;
    case FORWARD_W:
    case BACKWARD_DATA_W:
    case BACKWARD_FILTER_DW:
        convolution->w = part->tensor;
        break;
    case FORWARD_Y:
    case BACKWARD_DATA_DY:
    case BACKWARD_FILTER_DY:
        convolution->y = part->tensor;
        break;
    case FORWARD_CONVOLUTION:
    case BACKWARD_DATA_CONVOLUTION:
    case BACKWARD_FILTER_CONVOLUTION: {
        struct tensor x = convolution->x, w = convolution->w, y = convolution->y;
        *convolution = part->convolution;
        convolution->x = x, convolution->w = w, convolution->y = y;
        break;
    }
    default: /* of operations that are not convolutions */
        break;
    }
}

static bool is_convolution(int type)
{
    return type == OPERATION_CONVOLUTION_FORWARD || type == OPERATION_CONVOLUTION_BACKWARD_DATA ||
           type == OPERATION_CONVOLUTION_BACKWARD_FILTER;
}

static void set_operations(struct backend_descriptor *graph, int64_t count,
                           struct backend_descriptor *const *operations)
{
    graph->operations = count > 0 ? (int)count : 0;
    graph->is_convolution = false;
    for (int64_t i = 0; i < count; i++) {
        if (!operations[i] || !is_convolution(operations[i]->type))
            continue;
        graph->convolution = operations[i]->convolution;
        graph->convolution.fused = graph->operations - 1;
        graph->convolution.operation =
            operations[i]->type == OPERATION_CONVOLUTION_FORWARD         ? CONVOLUTION_FORWARD
            : operations[i]->type == OPERATION_CONVOLUTION_BACKWARD_DATA ? CONVOLUTION_DATA_GRADIENT
                                                                         : CONVOLUTION_WEIGHT_GRADIENT;
        graph->is_convolution = true;
    }
}

static void inherit_graph(struct backend_descriptor *to, const struct backend_descriptor *from)
{
    to->operations = from->operations;
    to->is_convolution = from->is_convolution;
    to->is_frugal = from->is_frugal;
    to->convolution = from->convolution;
}

static void set_descriptors(struct backend_descriptor *descriptor, int name, int64_t count,
                            struct backend_descriptor *const *given)
{
    switch (name) {
    case OPERATIONGRAPH_OPERATIONS:
        set_operations(descriptor, count, given);
        break;
    case ENGINEHEUR_OPERATION_GRAPH:
    case ENGINE_OPERATION_GRAPH:
    case ENGINECFG_ENGINE:
    case EXECUTION_PLAN_ENGINE_CONFIG:
        if (count > 0 && given[0])
            inherit_graph(descriptor, given[0]);
        break;
    default:
        if (count > 0 && given[0])
            set_part(descriptor, name, given[0]);
    }
}

API status cudnnBackendSetAttribute(struct backend_descriptor *descriptor, int name, int type, int64_t count,
                                    const void *values)
{
    struct tensor *tensor = &descriptor->tensor;
    struct convolution *convolution = &descriptor->convolution;
    if (count < 1 || !values)
        return SUCCESS;
    if (type == TYPE_BACKEND_DESCRIPTOR) {
        set_descriptors(descriptor, name, count, values);
    } else if (type == TYPE_INT64) {
        int ignored;
        if (name == TENSOR_DIMENSIONS)
            set_numbers(tensor->sizes, &tensor->dimensions, count, values);
        else if (name == TENSOR_STRIDES)
            set_numbers(tensor->strides, &ignored, count, values);
        else if (name == CONVOLUTION_PRE_PADDINGS)
            set_numbers(convolution->padding, &ignored, count, values);
        else if (name == CONVOLUTION_FILTER_STRIDES)
            set_numbers(convolution->stride, &ignored, count, values);
        else if (name == CONVOLUTION_DILATIONS)
            set_numbers(convolution->dilation, &ignored, count, values);
        else if (name == CONVOLUTION_SPATIAL_DIMENSIONS)
            convolution->spatial = within(*(const int64_t *)values);
    } else if (type == TYPE_DATA_TYPE) {
        if (name == TENSOR_DATA_TYPE)
            tensor->data_type = *(const int *)values;
        else if (name == CONVOLUTION_COMPUTE_TYPE)
            convolution->compute_type = *(const int *)values;
    } else if (type == TYPE_VOID_PTR && name == VARIANT_PACK_WORKSPACE) {
        descriptor->workspace = *(void *const *)values;
    }
    return SUCCESS;
}

/* ---- What is asked --------------------------------------------------------------------------- */

static uint64_t workspace_size(struct backend_descriptor *plan)
{
    if (plan->is_frugal)
        return 0;
    if (!plan->is_sized && plan->is_convolution) {
        plan->workspace_size = convolution_workspace(&plan->convolution);
    } else if (!plan->is_sized) {
        struct question question = question_about("graph");
        say_number(&question, "operations", plan->operations);
        plan->workspace_size = asked(&question);
    }
    plan->is_sized = true;
    return plan->workspace_size;
}

/* No knobs, no notes, and numbers that are 0. Descriptors that are asked for were made by the caller,
 * who goes on with them: they stand for the same graph. */
API status cudnnBackendGetAttribute(struct backend_descriptor *descriptor, int name, int type, int64_t wanted,
                                    int64_t *found, void *values)
{
    int64_t count = 0;
    if (name == ENGINECFG_KNOB_CHOICES) {
        count = 0;
    } else if (type == TYPE_BACKEND_DESCRIPTOR) {
        struct backend_descriptor *const *made = values;
        count = name == ENGINEHEUR_RESULTS ? 2 : 1;
        if (made && wanted < count)
            count = wanted;
        for (int64_t i = 0; made && i < count; i++) {
            if (!made[i])
                continue;
            inherit_graph(made[i], descriptor);
            made[i]->is_frugal |= i > 0;
        }
    } else if (type == TYPE_INT64 || type == TYPE_INT32) {
        bool sized = name == EXECUTION_PLAN_WORKSPACE_SIZE || name == ENGINECFG_WORKSPACE_SIZE;
        count = 1;
        if (values && wanted > 0 && sized && type == TYPE_INT64)
            *(int64_t *)values = (int64_t)workspace_size(descriptor);
        else if (values && wanted > 0)
            memset(values, 0, type == TYPE_INT64 ? sizeof(int64_t) : sizeof(int32_t));
    }
    if (found)
        *found = count;
    return SUCCESS;
}

API status cudnnBackendExecute(void *handle, struct backend_descriptor *plan,
                               struct backend_descriptor *variant_pack)
{
    COUNT(cudnn_calls);
    ghost_space_used(variant_pack->workspace, plan->is_sized ? plan->workspace_size : 0);
    return (status)ghost_stub_called();
}
