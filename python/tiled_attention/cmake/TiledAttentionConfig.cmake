# find_package(TiledAttention): Torch, and the target tiled_attention::operators. A program that links it has the operators of
# torch.ops.tiled_attention in torch's dispatcher.
include(CMakeFindDependencyMacro)
find_dependency(Torch 2.10)

get_filename_component(_tiled_attention_folder "${CMAKE_CURRENT_LIST_DIR}" DIRECTORY)
if(NOT EXISTS "${_tiled_attention_folder}/_cpu.abi3.so")
  set(TiledAttention_FOUND FALSE)
  set(TiledAttention_NOT_FOUND_MESSAGE
      "the operator library ${_tiled_attention_folder}/_cpu.abi3.so is missing: build it with `pip install --no-build-isolation .`")
  return()
endif()

if(NOT TARGET tiled_attention::operators)
  # The libraries register themselves when they are loaded: no symbol of them is used, and they have no soname.
  set(_tiled_attention_names "-l:_cpu.abi3.so")
  if(TARGET torch_cuda AND EXISTS "${_tiled_attention_folder}/_cuda.abi3.so")
    string(APPEND _tiled_attention_names ",-l:_cuda.abi3.so")
  endif()
  add_library(tiled_attention::operators INTERFACE IMPORTED)
  set_target_properties(tiled_attention::operators PROPERTIES
    INTERFACE_LINK_DIRECTORIES "${_tiled_attention_folder}"
    INTERFACE_LINK_OPTIONS "LINKER:-rpath,${_tiled_attention_folder}"
    INTERFACE_LINK_LIBRARIES "-Wl,--push-state,--no-as-needed,${_tiled_attention_names},--pop-state;torch")
endif()
