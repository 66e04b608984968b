# frozen_string_literal: true

# Checks the vectors of the wire format (tests/data/wire): ruby vectors.rb vectors.tsv

require 'digest'
require_relative 'tensors'
%w[adapters checkpoints imports operations sampling training].each { |name| require "tinkerpool/v1/#{name}_pb" }

# Returns a tensor of elements as text.
def again(dtype, texts)
  floats = texts.map { |text| [text.hex].pack('L<').unpack1('e') } if dtype == :DATA_TYPE_FLOAT32
  Tensors.tensor(dtype, floats || texts.map(&:to_i))
end

# Returns what of a vector is wrong.
def faults(vector)
  type = Google::Protobuf::DescriptorPool.generated_pool.lookup(vector['message']).msgclass
  wanted = [vector['bytes']].pack('H*')
  decoded = type.decode(wanted)
  found = []
  found << 'the values differ' if type.decode_json(vector['values']) != decoded
  # The encoder of this library cannot sort the entries of a map.
  encoded = type.encode(decoded)
  is_same = vector['encoding'] == 'sorted' ? type.decode(encoded) == decoded : encoded == wanted
  found << 'the encoded message has other bytes' unless is_same
  if decoded.is_a?(Tinkerpool::V1::Tensor)
    elements = vector['elements'].split(',')
    found << 'the elements differ' if Tensors.texts(decoded) != elements
    found << 'a tensor of the elements differs' if again(decoded.dtype, elements).data != decoded.data
  end
  digest = Digest::SHA256.hexdigest("#{vector['kind']}\0".b + wanted)
  found << 'the hash differs' unless ['-', digest].include?(vector['hash'])
  found
end

header, *lines = File.readlines(ARGV.fetch(0), chomp: true).map { |line| line.split("\t", -1) }
vectors = lines.map { |line| header.zip(line).to_h }
wrong = vectors.flat_map { |vector| faults(vector).map { |fault| "#{vector['name']}: #{fault}" } }
warn wrong
puts "#{vectors.size} vectors"
exit wrong.empty?
