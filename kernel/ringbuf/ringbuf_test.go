// SPDX-License-Identifier: Apache-2.0

package ringbuf

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"structs"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// event is what the programs of these tests send, as bpf2go would generate it.
type event struct {
	_      structs.HostLayout
	Number uint32
	Spare  uint32
}

// newBuffer is a ring buffer without events.
func newBuffer(t *testing.T) *ebpf.Map {
	t.Helper()
	nstest.NeedRoot(t)
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.RingBuf, MaxEntries: uint32(os.Getpagesize())})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// send has a program send events of a size with these numbers.
func send(t *testing.T, m *ebpf.Map, size int32, numbers ...int32) {
	t.Helper()
	for _, n := range numbers {
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SocketFilter, License: "Dual BSD/GPL", Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R1, 0),
			asm.StoreMem(asm.RFP, -8, asm.R1, asm.DWord),
			asm.StoreMem(asm.RFP, -12, asm.R1, asm.Word),
			asm.Mov.Imm(asm.R1, n),
			asm.StoreMem(asm.RFP, -16, asm.R1, asm.Word),
			asm.LoadMapPtr(asm.R1, m.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -16),
			asm.Mov.Imm(asm.R3, size),
			asm.Mov.Imm(asm.R4, 0),
			asm.FnRingbufOutput.Call(),
			asm.Mov.Imm(asm.R0, 0),
			asm.Return(),
		}})
		if err != nil {
			t.Fatal(err)
		}
		_, err = p.Run(&ebpf.RunOptions{Data: make([]byte, 64)})
		p.Close()
		if err != nil {
			t.Fatal(err)
		}
	}
}

func open(t *testing.T, m *ebpf.Map) *Reader[event] {
	t.Helper()
	r, err := Open[event](m)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

// read returns the numbers of the next events, in their order.
func read(t *testing.T, r *Reader[event], count int) (got []uint32) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for e, err := range r.Events(ctx) {
		if err != nil {
			t.Fatal(err)
		}
		if got = append(got, e.Number); len(got) == count {
			return got
		}
	}
	t.Fatalf("events %v, want %d", got, count)
	return nil
}

// Events come in their order, those from before Open too. A caller that leaves the loop reads on later. The reader outlives its map's
// descriptor.
func TestReads(t *testing.T) {
	m := newBuffer(t)
	send(t, m, 8, 1, 2)
	r := open(t, m)
	send(t, m, 8, 3)
	if got := read(t, r, 2); !slices.Equal(got, []uint32{1, 2}) {
		t.Errorf("events %v, want 1 and 2", got)
	}
	send(t, m, 16, 4) // of a later version, with more fields
	m2, err := m.Clone()
	if err != nil {
		t.Fatal(err)
	}
	defer m2.Close()
	m.Close()
	send(t, m2, 8, 5)
	if got := read(t, r, 3); !slices.Equal(got, []uint32{3, 4, 5}) {
		t.Errorf("events %v, want 3, 4 and 5", got)
	}
}

// An event that is too short is an error, and the next one is read.
func TestReadsAfterShortEvent(t *testing.T) {
	m := newBuffer(t)
	send(t, m, 4, 1)
	send(t, m, 8, 2)
	var short error
	for e, err := range open(t, m).Events(t.Context()) {
		if err != nil {
			short = errors.Join(short, err)
			continue
		}
		if e.Number != 2 {
			t.Errorf("event %d, want 2", e.Number)
		}
		break
	}
	if !errors.Is(short, ErrShort) || short.Error() != "event is too short: 4 bytes, want 8 of ringbuf.event" {
		t.Errorf("error %v, want one of the short event", short)
	}
}

// A quiet buffer yields ErrIdle again and again, and its events.
func TestIdle(t *testing.T) {
	m := newBuffer(t)
	r := open(t, m)
	r.Idle = 5 * time.Millisecond
	idle := 0
	for e, err := range r.Events(t.Context()) {
		switch {
		case errors.Is(err, ErrIdle):
			if idle++; idle == 2 {
				send(t, m, 8, 7)
			}
			continue
		case err != nil || e.Number != 7:
			t.Errorf("event %d, %v; want 7", e.Number, err)
		}
		break
	}
	if idle < 2 {
		t.Errorf("idle %d times, want 2 or more", idle)
	}
}

// The end of the context and Close each end a loop that waits, and every later one.
func TestEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	for name, end := range map[string]func(*Reader[event]){
		"context": func(*Reader[event]) { cancel() },
		"close":   func(r *Reader[event]) { r.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			m := newBuffer(t)
			r := open(t, m)
			send(t, m, 8, 1)
			waits, ended := make(chan struct{}), make(chan struct{})
			var all sync.WaitGroup
			all.Go(func() {
				defer close(ended)
				for range r.Events(ctx) {
					close(waits) // a second event is an error: nothing sends one
				}
			})
			<-waits
			end(r)
			select {
			case <-ended:
			case <-time.After(30 * time.Second):
				t.Fatal("the loop waits on")
			}
			send(t, m, 8, 2)
			for e, err := range r.Events(t.Context()) {
				t.Errorf("event %d, %v after the end", e.Number, err)
			}
			if err := r.Close(); err != nil {
				t.Errorf("closing again: %v", err)
			}
			all.Wait()
		})
	}
}

// A map of another type is refused.
func TestOpenRefuses(t *testing.T) {
	nstest.NeedRoot(t)
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if r, err := Open[event](m); err == nil {
		r.Close()
		t.Error("an array is read as a ring buffer")
	}
}

// A reader that runs until ctx is done.
func ExampleReader_Events() {
	var m *ebpf.Map // of a loaded program
	watch := func(ctx context.Context) error {
		r, err := Open[event](m)
		if err != nil {
			return err
		}
		defer r.Close()
		for e, err := range r.Events(ctx) {
			if err != nil {
				return err
			}
			fmt.Println("event", e.Number)
		}
		return ctx.Err()
	}
	_ = watch
}
