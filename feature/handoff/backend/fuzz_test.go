// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"bytes"
	"testing"
)

// FuzzKept checks that the agent's kept state is read back unchanged, and other data is rejected.
func FuzzKept(f *testing.F) {
	k := kept{Receiving: true, Epoch: 3, Other: 2, Put: 9, Carried: carried{Name: "a", Label: "b", State: []byte("s"), Unread: []byte("u")}, Kernel: []byte("kk")}
	f.Add(k.append(nil))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		_, _, _ = parseCarried(b)
		k, err := parseKept(b)
		if err != nil {
			return
		}
		again, err := parseKept(k.append(nil))
		if err != nil || !bytes.Equal(again.Kernel, k.Kernel) || again.Carried.Name != k.Carried.Name || again.Epoch != k.Epoch || again.Put != k.Put {
			t.Errorf("%+v became %+v, %v", k, again, err)
		}
	})
}

func FuzzConfig(f *testing.F) {
	f.Add([]byte("name: s1\nnumber: 1\naddress: 10.2.0.2\nlisten: 10.2.0.2:7947\nlb: {address: 10.2.0.1:7946}\ntls: {certificate: a, key: b, ca: c}\ndevices: [eth0]\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if c, err := parseConfig("x", b); err == nil && c == nil {
			t.Error("neither a configuration nor an error")
		}
	})
}
