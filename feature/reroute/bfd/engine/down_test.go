// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
	"github.com/weir-project/weir/kernel/kerneltest"
)

// Programs read setups while user space writes them. The shutdown must be written before the generation. A program
// seeing the new generation first would not read again.
func TestDownInTwoSteps(t *testing.T) {
	b := newBench(t)
	s := &Session{Config: bfd.Config{Discriminator: 0x01020304, Multiplier: 3, DesiredTx: time.Second, RequiredRx: time.Second},
		Local: local4, Peer: peer4, Ifindex: b.index, SourcePort: 50000}
	if err := b.w.put(0, s, 1); err != nil {
		t.Fatal(err)
	}
	b.at(0)
	b.tick()
	steps := 0
	kerneltest.OnStep(func(step string) {
		if step != "bfd:down" {
			return
		}
		steps++
		var c bpf.BfdBfdSetup
		if err := b.w.setups.Lookup(uint32(0), &c); err != nil || c.Down != 1 || c.Generation != 1 {
			t.Errorf("on the way: down %d, generation %d, %v", c.Down, c.Generation, err)
		}
		b.tick()
	})
	t.Cleanup(func() { kerneltest.OnStep(nil) })
	if err := b.w.down(0); err != nil {
		t.Fatal(err)
	}
	b.tick()
	if st, _, err := b.w.status(0); err != nil || st.State != bfd.AdminDown || steps != 1 {
		t.Errorf("%+v, %v, after %d steps", st, err, steps)
	}
}
