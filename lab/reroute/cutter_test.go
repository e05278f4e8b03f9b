// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"testing"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// A cut end accepts only the forger's frames, and the other end is not affected.
func TestCutter(t *testing.T) {
	nstest.NeedRoot(t)
	m, err := ebpf.NewMap(words())
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	c := &cutter{m}
	frame, forged := make([]byte, 160), make([]byte, 160)
	copy(forged[6:], forgerMAC)
	for end := range 2 {
		p, err := program(m, end)
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		for _, on := range []bool{false, true, false} {
			if _, err := c.cut(on && end == 0, on && end == 1); err != nil {
				t.Fatal(err)
			}
			want := int32(-1)
			if on {
				want = 2
			}
			for _, x := range []struct {
				frame []byte
				want  int32
			}{{frame, want}, {forged, -1}} {
				if got, _, err := p.Test(x.frame); err != nil || int32(got) != x.want {
					t.Errorf("end %d, cut %t, from %x: %d, %v; want %d", end, on, x.frame[6:12], int32(got), err, x.want)
				}
			}
		}
	}
}
