// SPDX-License-Identifier: Apache-2.0

package compile

import "github.com/cilium/ebpf"

const readOnlyProgram = 1 << 7 // BPF_F_RDONLY_PROG

// groupMap adds the map of a group: field values → decision.
func (p *Program) groupMap(gr *group) {
	m := &ebpf.MapSpec{Name: gr.name, Type: ebpf.Hash, KeySize: uint32(gr.keySize), ValueSize: 4, MaxEntries: uint32(len(gr.keys)),
		Flags: readOnlyProgram, Contents: make([]ebpf.MapKV, 0, len(gr.keys))}
	for k, rule := range gr.keys {
		m.Contents = append(m.Contents, ebpf.MapKV{Key: []byte(k), Value: uint32(p.decision(rule))})
	}
	p.Spec.Maps[gr.name] = m
}
