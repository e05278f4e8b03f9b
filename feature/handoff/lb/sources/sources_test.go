// SPDX-License-Identifier: Apache-2.0

package sources

import (
	"testing"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

func TestMake(t *testing.T) {
	nstest.NeedRoot(t)
	kernel.LiftMemlock()
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 2})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	if made, err := Made(m); made || err != nil {
		t.Errorf("%v, %v: want a new table's", made, err)
	}
	for _, c := range []struct {
		learned     uint64
		known, size int
		until       uint64
		full        bool
	}{{0, 0, 400, 300, false}, {1000, 100, 400, 1200, false}, {1000, 300, 400, 1000, false}, {1000, 301, 400, 1000, true}, {0, 400, 400, 1, true}} {
		full, err := Make(m, c.learned, c.known, c.size)
		if err != nil || full != c.full {
			t.Errorf("%+v: %v, %v", c, full, err)
		}
		var until uint64
		if err := m.Lookup(uint32(untilAt), &until); err != nil || until != c.until {
			t.Errorf("%+v: %d, %v", c, until, err)
		}
		if made, err := Made(m); !made || err != nil {
			t.Errorf("%v, %v", made, err)
		}
	}
	if n, err := Learned(m); n != 0 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
}
