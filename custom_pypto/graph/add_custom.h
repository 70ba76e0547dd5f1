// GE prototype of custom_pypto::add_custom.
#ifndef CUSTOM_PYPTO_GRAPH_ADD_CUSTOM_H
#define CUSTOM_PYPTO_GRAPH_ADD_CUSTOM_H

#include "graph/operator_reg.h"

namespace ge {

REG_OP(AddCustom)
    .INPUT(self, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(other, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OUTPUT(out, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OP_END_FACTORY_REG(AddCustom)

}  // namespace ge

#endif
