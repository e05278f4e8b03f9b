// SPDX-License-Identifier: Apache-2.0

package templates

import "github.com/weir-project/weir/internal/ipfix"

// replayMessages encodes templates in messages of at most limit bytes. Only a single large template may exceed it. next
// is the sequence number of the exporter's next message. After the replay a collector expects exactly this number.
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
		h.Sequence = next // templates are not data records, so IPFIX does not count them
		if h.Version == ipfix.NetFlow9 {
			h.Sequence = next - uint32(len(parts)-i)
		}
		out = append(out, ipfix.Encode(h, p))
	}
	return out
}
