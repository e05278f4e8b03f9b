// SPDX-License-Identifier: Apache-2.0

package state

import (
	"fmt"

	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/printable"
)

// ProcessName is the name of a process, or its number where it has exited.
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
