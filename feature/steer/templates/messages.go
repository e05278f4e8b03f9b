// SPDX-License-Identifier: Apache-2.0

package templates

import "github.com/weir-project/weir/internal/ipfix"

// replayMessages carries templates in messages of at most limit bytes each,
// more only where one template alone needs them. next is the sequence number
// that the exporter's next message will have: after the replay a collector
// expects just that.
func replayMessages(h ipfix.Header, next uint32, templates []ipfix.Template, limit int) [][]byte {
	var parts [][]ipfix.Template
	size := 0
	for _, t := range templates {
		need := len(t.Record)
		if n := len(parts); n == 0 || size+need+2*4 > limit-20 {
			parts = append(parts, nil)
			size = 0
		}
		parts[len(parts)-1] = append(parts[len(parts)-1], t)
		size += need
	}
	var out [][]byte
	for i, p := range parts {
		h.Sequence = next // templates are no data records, so ipfix.IPFIX does not count on
		if h.Version == ipfix.NetFlow9 {
			h.Sequence = next - uint32(len(parts)-i)
		}
		out = append(out, ipfix.Encode(h, p))
	}
	return out
}
