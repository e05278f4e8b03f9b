// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/kernel"
)

// addShared shows what the hook did for the service.
func (s *ServiceState) addShared(r *kernel.Root) {
	if !s.pub.Service.SharePort {
		return
	}
	if c, err := engine.ReadShared(s.pub, r); err != nil {
		s.Problem = engine.ProblemBind
	} else {
		s.Shared = &c
	}
}
