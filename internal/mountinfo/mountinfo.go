// SPDX-License-Identifier: Apache-2.0

// Package mountinfo reads the mounts of a thread, from proc_pid_mountinfo(5).
package mountinfo

import (
	"os"
	"slices"
	"strings"
)

// Mount is a line of mountinfo.
type Mount struct {
	Device string // MAJOR:MINOR
	Root   string // directory of the file system at the mount point
	Point  string // mount point
	Type   string // type of the file system, like "fuse.sshfs"
	Source string
	Super  string // options of the file system, separated by commas
}

// Read returns the mounts of the calling thread. A later mount covers an earlier one at the same point.
func Read() ([]Mount, error) {
	text, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, err
	}
	return Parse(string(text)), nil
}

// Parse parses the text of a mountinfo file. It skips incomplete lines.
//
//	36 35 98:0 ROOT POINT options [optional…] - TYPE SOURCE super
func Parse(text string) (out []Mount) {
	for line := range strings.Lines(text) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), " ") // paths may contain other white space
		end := slices.Index(f, "-")
		if end < 6 || len(f) < end+3 {
			continue
		}
		m := Mount{Device: f[2], Root: unescape(f[3]), Point: unescape(f[4]), Type: unescape(f[end+1]), Source: unescape(f[end+2])}
		if len(f) > end+3 {
			m.Super = unescape(f[end+3])
		}
		out = append(out, m)
	}
	return out
}

// unescape decodes the kernel's octal escapes, like \040 for a space.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if n, ok := octal(s[i:]); ok {
			b.WriteByte(n)
			i += len(`\040`) - 1
			continue
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// octal decodes the escape at the beginning of s.
func octal(s string) (n byte, ok bool) {
	if len(s) < 4 || s[0] != '\\' || s[1] > '3' {
		return 0, false
	}
	for _, c := range []byte(s[1:4]) {
		if c < '0' || c > '7' {
			return 0, false
		}
		n = n<<3 | (c - '0')
	}
	return n, true
}
