// SPDX-License-Identifier: Apache-2.0

package state

import (
	"fmt"

	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/printable"
)

// ProcessName returns the number and name of a process. After its exit only the number is known.
func ProcessName(pid int) string {
	p, err := pidfd.Open(pid)
	if err != nil {
		return fmt.Sprintf("process %d", pid)
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return fmt.Sprintf("process %d", pid)
	}
	return fmt.Sprintf("process %d (%s)", pid, printable.Text(info.Comm))
}
