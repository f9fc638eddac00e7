// proxsparse._C: the Python names of the functions in ops.h.
#include <torch/csrc/utils/pybind.h>

#include "ops.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The compiled CPU kernels of proxsparse; csrc/ops.h documents them.";
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  module.def("prox_nm_", &proxsparse::prox_nm_, py::arg("weight"), py::arg("reg_lambda"), py::arg("m"), without_gil);
  module.def("adamw_prox_", &proxsparse::adamw_prox_, py::arg("weight"), py::arg("grad"), py::arg("exp_avg"),
             py::arg("exp_avg_sq"), py::arg("master"), py::arg("scale"), py::arg("step"), py::arg("lr"),
             py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), py::arg("reg_lambda"),
             py::arg("m"), py::arg("seed"), without_gil);
  module.def("cpu_capability", &proxsparse::cpu_capability);
  module.def("mask_nm", &proxsparse::mask_nm, py::arg("score"), py::arg("m"), py::arg("mask"), without_gil);
  module.def("masked_weight_nm_", &proxsparse::masked_weight_nm_, py::arg("out"), py::arg("weight"),
             py::arg("pretrained"), py::arg("scale"), py::arg("m"), without_gil);
  module.def("pack_24", &proxsparse::pack_24, py::arg("weight"), py::arg("values"), py::arg("indices"), without_gil);
  module.def("unpack_24", &proxsparse::unpack_24, py::arg("values"), py::arg("indices"), py::arg("weight"),
             without_gil);
  module.def("quantize_nm", &proxsparse::quantize_nm, py::arg("values"), py::arg("codes"), py::arg("scales"),
             without_gil);
  module.def("dequantize_nm", &proxsparse::dequantize_nm, py::arg("codes"), py::arg("scales"), py::arg("values"),
             without_gil);
  module.def("sparse_linear", &proxsparse::sparse_linear, py::arg("x"), py::arg("values"), py::arg("indices"),
             py::arg("scales"), py::arg("bias"), py::arg("y"), py::arg("m"), without_gil);
  module.def("sparse_linear_direct", &proxsparse::sparse_linear_direct, py::arg("x"), py::arg("values"),
             py::arg("indices"), py::arg("scales"), py::arg("bias"), py::arg("m"), without_gil);
}
