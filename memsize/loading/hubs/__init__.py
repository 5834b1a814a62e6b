"""Models by their names in a library: ``hf:config.json``, ``timm:resnet18``, ``torchvision:vgg11``."""

from memsize.loading.hubs.libraries import LibraryModel, load_library_model, model_names, quiet

__all__ = ["LibraryModel", "load_library_model", "model_names", "quiet"]
