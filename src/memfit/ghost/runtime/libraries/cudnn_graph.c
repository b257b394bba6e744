/* cuDNN's graph API: how PyTorch runs convolutions (with bias and activation) and attention.
 *
 *   tensors, convolution ──> operations ──> operation graph ──> heuristics ──> engine configurations
 *   configuration ──> execution plan ──> its workspace's size; execute with a variant pack
 *
 * The attributes set on a descriptor are written as JSON, and copied into each descriptor made from it:
 *
 *   {"type":17,"attributes":[[901,1,[0]],[902,3,[1,64,224,224]],...]}    name, type, values; in a graph
 *                                                                        the values are descriptors again
 *
 * When heuristics are finalized, all of it is the question, and the answer is the list of configurations:
 * each with its workspace, its engine's number and notes. PyTorch chooses among them as on a card
 * (filterEngineConfigs and try_configs in aten/src/ATen/native/cudnn/Conv_v8.cpp).
 */
#include "libraries/cudnn.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define MOST_OFFERS 256
#define DNN_ALLOC_FAILED 4003 /* cudnn_graph.h 9.24, CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED */

/* Source: cudnn_graph.h 9.24; the numbers have not moved since cuDNN 9.0. Types that are not listed are
 * enums. */
enum attribute_type {
    TYPE_HANDLE = 0,
    TYPE_BOOLEAN = 2,
    TYPE_INT64 = 3,
    TYPE_FLOAT = 4,
    TYPE_DOUBLE = 5,
    TYPE_VOID_PTR = 6,
    TYPE_NUMERICAL_NOTE = 11,
    TYPE_BACKEND_DESCRIPTOR = 15,
    TYPE_BEHAVIOR_NOTE = 19,
    TYPE_INT32 = 23,
    TYPE_CHAR = 24,
    TYPE_FRACTION = 26,
};
enum descriptor_type { ENGINECFG = 3, ENGINEHEUR = 4, EXECUTION_PLAN = 5, VARIANT_PACK = 16 };
enum attribute_name {
    ENGINEHEUR_RESULTS = 202,
    ENGINECFG_ENGINE = 300,
    ENGINECFG_WORKSPACE_SIZE = 303,
    EXECUTION_PLAN_ENGINE_CONFIG = 401,
    EXECUTION_PLAN_WORKSPACE_SIZE = 402,
    EXECUTION_PLAN_JSON = 405,
    VARIANT_PACK_WORKSPACE = 1003,
    ENGINE_GLOBAL_INDEX = 1301,
};

/* One struct for every type: `type` determines which fields are used. */
struct backend_descriptor {
    int type;
    struct text attributes;             /* what was set, a JSON list without its brackets */
    struct ghost_configuration *offers; /* of heuristics */
    int offer_count;
    struct ghost_configuration chosen; /* of a configuration, and of its engine and plan */
    bool is_chosen;
    void *workspace; /* of a variant pack */
};

API status cudnnBackendCreateDescriptor(int type, void **descriptor)
{
    status result = ghost_new_handle(descriptor, sizeof(struct backend_descriptor));
    if (result == SUCCESS)
        ((struct backend_descriptor *)*descriptor)->type = type;
    return result;
}

API status cudnnBackendDestroyDescriptor(void *opaque)
{
    struct backend_descriptor *descriptor = opaque;
    if (descriptor) {
        free_text(&descriptor->attributes);
        free(descriptor->offers);
    }
    free(descriptor);
    return SUCCESS;
}

/* ---- Setting attributes ---------------------------------------------------------------------- */

static void choose(struct backend_descriptor *descriptor, const struct ghost_configuration *configuration)
{
    descriptor->chosen = *configuration;
    descriptor->is_chosen = true;
}

static void append_descriptor(struct text *text, const struct backend_descriptor *descriptor)
{
    append(text, "{\"type\":%d,\"attributes\":[", descriptor->type);
    if (descriptor->attributes.count)
        append(text, "%s", descriptor->attributes.items);
    append(text, "]}");
    text->cut |= descriptor->attributes.cut;
}

static void append_value(struct text *text, int type, const void *values, int64_t i)
{
    double real = 0;
    switch (type) {
    case TYPE_BACKEND_DESCRIPTOR:
        append_descriptor(text, ((struct backend_descriptor *const *)values)[i]);
        return;
    case TYPE_INT64: append(text, "%lld", (long long)((const int64_t *)values)[i]); return;
    case TYPE_BOOLEAN: append(text, "%d", ((const bool *)values)[i]); return;
    case TYPE_CHAR: append(text, "%d", ((const unsigned char *)values)[i]); return;
    case TYPE_FLOAT:
    case TYPE_DOUBLE:
        real = type == TYPE_FLOAT ? (double)((const float *)values)[i] : ((const double *)values)[i];
        append(text, "%.17g", real);
        text->cut |= !isfinite(real); /* JSON cannot express it */
        return;
    default: append(text, "%d", ((const int32_t *)values)[i]);
    }
}

API status cudnnBackendSetAttribute(struct backend_descriptor *descriptor, int name, int type, int64_t count,
                                    const void *values)
{
    if (count < 1 || !values)
        return SUCCESS;
    bool descriptors = type == TYPE_BACKEND_DESCRIPTOR;
    for (int64_t i = 0; descriptors && i < count; i++)
        if (!((void *const *)values)[i])
            return DNN_BAD_PARAM;
    if (descriptors && (name == ENGINECFG_ENGINE || name == EXECUTION_PLAN_ENGINE_CONFIG)) {
        const struct backend_descriptor *given = *(struct backend_descriptor *const *)values;
        if (given->is_chosen)
            choose(descriptor, &given->chosen);
    }
    if (type == TYPE_VOID_PTR && name == VARIANT_PACK_WORKSPACE)
        descriptor->workspace = *(void *const *)values;
    /* Addresses are not part of a question, nor are descriptors that are made at every call. */
    if (type == TYPE_HANDLE || type == TYPE_VOID_PTR || descriptor->type == EXECUTION_PLAN ||
        descriptor->type == VARIANT_PACK)
        return SUCCESS;
    struct text *attributes = &descriptor->attributes;
    attributes->cut |= type == TYPE_FRACTION;
    append(attributes, attributes->count ? ",[%d,%d,[" : "[%d,%d,[", name, type);
    for (int64_t i = 0; i < count; i++) {
        if (i)
            append(attributes, ",");
        append_value(attributes, type, values, i);
    }
    append(attributes, "]]");
    return SUCCESS;
}

/* ---- Finalizing and getting attributes ------------------------------------------------------- */

API status cudnnBackendFinalize(struct backend_descriptor *descriptor)
{
    if (descriptor->type == ENGINECFG && !descriptor->is_chosen)
        ghost_assumed("an engine that cuDNN's heuristics did not choose");
    if (descriptor->type != ENGINEHEUR || descriptor->offers)
        return SUCCESS;
    descriptor->offers = calloc(MOST_OFFERS, sizeof *descriptor->offers);
    if (!descriptor->offers)
        return DNN_ALLOC_FAILED;
    struct text question = begin_question("plan");
    append(&question, ",\"descriptor\":");
    append_descriptor(&question, descriptor);
    descriptor->offer_count = ask_configurations(&question, descriptor->offers, MOST_OFFERS);
    return SUCCESS;
}

/* The caller created the descriptors that are filled in here, and continues with them. */
static int64_t get_descriptors(const struct backend_descriptor *descriptor, int name, int64_t wanted,
                               struct backend_descriptor *const *made)
{
    bool results = name == ENGINEHEUR_RESULTS;
    bool one = name == ENGINECFG_ENGINE || name == EXECUTION_PLAN_ENGINE_CONFIG;
    int64_t count = results ? descriptor->offer_count : one ? 1 : 0;
    if (made && wanted < count)
        count = wanted;
    for (int64_t i = 0; made && i < count; i++)
        if (made[i] && (results || descriptor->is_chosen))
            choose(made[i], results ? &descriptor->offers[i] : &descriptor->chosen);
    return count;
}

static int64_t get_notes(uint32_t notes, int64_t wanted, int32_t *values)
{
    int64_t count = 0;
    for (int note = 0; note < 32; note++) {
        if (!(notes >> note & 1))
            continue;
        if (values && count < wanted)
            values[count] = note;
        count += !values || count < wanted;
    }
    return count;
}

static int64_t number(const struct backend_descriptor *descriptor, int name)
{
    switch (name) {
    case EXECUTION_PLAN_WORKSPACE_SIZE:
        if (descriptor->chosen.workspace)
            ghost_workspace_reported(descriptor->chosen.workspace);
        return (int64_t)descriptor->chosen.workspace;
    case ENGINECFG_WORKSPACE_SIZE: return (int64_t)descriptor->chosen.workspace;
    case ENGINE_GLOBAL_INDEX: return descriptor->chosen.engine;
    default: return 0;
    }
}

/* PyTorch 2.14 reads which architecture a plan's kernels are for, to reject some engines there
 * (plan_errata_exception in Conv_v8.cpp). They are taken to be for the device's own. */
static int64_t get_text(int name, int64_t wanted, char *values)
{
    char text[32];
    if (name != EXECUTION_PLAN_JSON)
        return 0;
    int64_t count =
        snprintf(text, sizeof text, "{\"smVersion\":%d}", 100 * ghost_spec.major + 10 * ghost_spec.minor);
    if (values && wanted < count)
        count = wanted > 0 ? wanted : 0;
    if (values)
        memcpy(values, text, (size_t)count);
    return count;
}

/* There are no knobs, and numbers are 0 unless they are known. */
API status cudnnBackendGetAttribute(struct backend_descriptor *descriptor, int name, int type, int64_t wanted,
                                    int64_t *found, void *values)
{
    int64_t count = 0;
    if (type == TYPE_BACKEND_DESCRIPTOR) {
        count = get_descriptors(descriptor, name, wanted, values);
    } else if (type == TYPE_NUMERICAL_NOTE) {
        count = get_notes(descriptor->chosen.numerical_notes, wanted, values);
    } else if (type == TYPE_BEHAVIOR_NOTE) {
        count = get_notes(descriptor->chosen.behavior_notes, wanted, values);
    } else if (type == TYPE_CHAR) {
        count = get_text(name, wanted, values);
    } else if (type == TYPE_INT64 || type == TYPE_INT32) {
        count = 1;
        if (values && wanted > 0 && type == TYPE_INT64)
            *(int64_t *)values = number(descriptor, name);
        else if (values && wanted > 0)
            *(int32_t *)values = (int32_t)number(descriptor, name);
    }
    if (found)
        *found = count;
    return SUCCESS;
}

API status cudnnBackendExecute(void *handle, struct backend_descriptor *plan,
                               struct backend_descriptor *variant_pack)
{
    COUNT(cudnn_calls);
    if (plan->chosen.workspace)
        ghost_workspace_used(variant_pack->workspace, plan->chosen.workspace);
    else
        ghost_workspace_reported(0);
    return (status)ghost_stub_called();
}
