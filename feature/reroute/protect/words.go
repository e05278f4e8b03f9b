// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/links"
)

// Places of protection's bytes in a link's word (links.h), and how far apart words are: an array's elements begin at multiples
// of eight bytes (array_map_alloc in kernel/bpf/arraymap.c).
const (
	wordApart   = 8
	carrierByte = 1
	drainByte   = 2
)

// words is the map of links' words, mapped. Each byte has one writer, and one store changes it.
type words struct{ memory []byte }

func mapWords(m *ebpf.Map) (*words, error) {
	memory, err := unix.Mmap(m.FD(), 0, links.Slots*wordApart, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mapping the words of links: %w", err)
	}
	return &words{memory}, nil
}

func (w *words) close() { _ = unix.Munmap(w.memory) }

// set sets one byte of a link's word, and says whether it was another.
func (w *words) set(slot uint32, at int, on bool) bool {
	var v byte
	if on {
		v = 1
	}
	b := &w.memory[int(slot)*wordApart+at]
	was := *b
	*b = v
	return was != v
}

func (w *words) get(slot uint32) (v links.Word) {
	copy(v[:], w.memory[int(slot)*wordApart:])
	return v
}

// Mark is what a packet's mark (SO_MARK, or skb->mark set by a program) says of weir's own probes: they stay on the link that they
// are sent to, whatever is known of it.
const Mark = links.Mark
