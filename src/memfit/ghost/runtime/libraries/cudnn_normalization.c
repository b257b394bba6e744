/* Batch normalization: the workspace of a pass, and the reserve space between the two. */
#include "libraries/cudnn.h"

static status batch_norm_space(const char *space, int mode, int operations, const struct tensor *x,
                               size_t *size)
{
    struct text question = begin_question("batch norm");
    add_text(&question, "space", space);
    add_number(&question, "mode", mode);
    add_number(&question, "operations", operations);
    add_tensor(&question, "x", x);
    *size = (size_t)ask_workspace(&question);
    return SUCCESS;
}

CALL(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int operations,
                                                              struct tensor *x, void *z, void *y, void *scale,
                                                              void *activation, size_t *size),
     batch_norm_space("forward", mode, operations, x, size))
CALL(cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operations,
                                                       struct tensor *x, void *y, void *dy, void *dz,
                                                       void *dx, void *scale, void *activation, size_t *size),
     batch_norm_space("backward", mode, operations, x, size))
CALL(cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operations,
                                                          void *activation, struct tensor *x, size_t *size),
     batch_norm_space("reserve", mode, operations, x, size))

API status cudnnBatchNormalizationForwardTrainingEx(void *handle, int mode, int operations, const void *alpha,
                                                    const void *beta, void *x, const void *x_data, void *z,
                                                    const void *z_data, void *y, void *y_data,
                                                    void *parameters, const void *scale, const void *bias,
                                                    double average_factor, void *running_mean,
                                                    void *running_variance, double epsilon, void *saved_mean,
                                                    void *saved_variance, void *activation, void *workspace,
                                                    size_t workspace_size, void *reserve, size_t reserve_size)
{
    ghost_workspace_used(workspace, workspace_size);
    ghost_workspace_used(reserve, reserve_size);
    return (status)ghost_stub_called();
}

API status cudnnBatchNormalizationBackwardEx(
    void *handle, int mode, int operations, const void *alpha_data, const void *beta_data,
    const void *alpha_parameters, const void *beta_parameters, void *x, const void *x_data, void *y,
    const void *y_data, void *dy, const void *dy_data, void *dz, void *dz_data, void *dx, void *dx_data,
    void *parameters, const void *scale, const void *bias, void *scale_gradient, void *bias_gradient,
    double epsilon, const void *saved_mean, const void *saved_variance, void *activation, void *workspace,
    size_t workspace_size, void *reserve, size_t reserve_size)
{
    ghost_workspace_used(workspace, workspace_size);
    return (status)ghost_stub_called();
}
