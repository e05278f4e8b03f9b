// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"
	"fmt"

	"github.com/cilium/ebpf"
)

// LookupPadded reads the value of a key whose layout may be an older one: what a
// shorter value lacks at its end is zero. The fields of v stand in the order and
// the byte order of the host, with padding spelt out. It returns
// ebpf.ErrKeyNotExist where there is no such key.
func LookupPadded(m *ebpf.Map, key, v any) error {
	b, err := m.LookupBytes(key)
	switch {
	case err != nil:
		return err
	case b == nil:
		return fmt.Errorf("%s: %w", m, ebpf.ErrKeyNotExist)
	}
	return Pad(b, v)
}

// Pad reads v from the bytes of a value as [LookupPadded] does.
func Pad(b []byte, v any) error {
	size := binary.Size(v)
	if len(b) > size {
		return fmt.Errorf("%w: a value of %d bytes where this weir knows %d", ErrABI, len(b), size)
	}
	whole := make([]byte, size)
	copy(whole, b)
	_, err := binary.Decode(whole, binary.NativeEndian, v)
	return err
}
