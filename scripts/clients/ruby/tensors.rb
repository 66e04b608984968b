# frozen_string_literal: true

require 'tinkerpool/v1/types_pb'

# Tensors: little-endian bytes with dtype and shape.
module Tensors
  FORMATS = { DATA_TYPE_FLOAT32: 'e*', DATA_TYPE_INT32: 'l<*', DATA_TYPE_INT64: 'q<*' }.freeze

  # Returns numbers as a tensor of one dimension.
  def self.tensor(dtype, values)
    Tinkerpool::V1::Tensor.new(data: values.pack(FORMATS.fetch(dtype)), dtype: dtype, shape: [values.size])
  end

  # Returns the elements of a tensor as text: integers in decimal, floats as their bits in hexadecimal.
  def self.texts(tensor)
    return tensor.data.unpack('L<*').map { |word| format('%08x', word) } if tensor.dtype == :DATA_TYPE_FLOAT32

    tensor.data.unpack(FORMATS.fetch(tensor.dtype)).map(&:to_s)
  end
end
