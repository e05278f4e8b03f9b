// SPDX-License-Identifier: Apache-2.0

package dplane

import (
	"bytes"
	"testing"
)

// Anybody with access to bfdd's socket can send any message.
func FuzzMessages(f *testing.F) {
	f.Add(appendMessage(nil, 1, addSession, 1, make([]byte, 132)))
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		for r := bytes.NewReader(b); ; {
			m, err := read(r)
			if err != nil {
				return
			}
			_, _ = parseSession(m.body)
		}
	})
}
