// SPDX-License-Identifier: Apache-2.0

package guard

import "testing"

// TestSocketProgramFits bounds the size of the socket's program. The kernel charges its
// instructions to the socket's option memory (sk_filter_charge), 20,480 bytes before Linux 6.8. The
// application's own options and control messages share this memory.
func TestSocketProgramFits(t *testing.T) {
	need(t)
	const optmem, application = 20_480, 1536 // bytes
	c, err := load(constants{}, nil, Socket)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	info, err := c.Programs[Socket.program()].Info()
	if err != nil {
		t.Fatal(err)
	}
	size, err := info.TranslatedSize()
	if err != nil {
		t.Fatal(err)
	}
	if size > optmem-application {
		t.Errorf("the socket's program has %d bytes of instructions, want at most %d: Linux 6.1 refuses larger ones (ENOMEM)", size, optmem-application)
	}
	t.Logf("%d bytes of %d", size, optmem)
}
