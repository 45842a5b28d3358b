// A program without Python that runs the package of aoti_package.py: aoti_main LIBRARY PACKAGE
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <iostream>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

int main(int, char **arguments) {
    if (!dlopen(arguments[1], RTLD_NOW)) return std::cerr << dlerror() << "\n", 1;
    torch::inductor::AOTIModelPackageLoader model(arguments[2]);
    for (int64_t rows : {5, 64, 300}) {
        auto options = at::dtype(at::kBFloat16).device(at::kCUDA);
        std::vector<at::Tensor> inputs = {at::ones({rows, 512}, options)};
        std::cout << rows << " rows, mean " << model.run(inputs)[0].mean().item<float>() << "\n";
    }
}
