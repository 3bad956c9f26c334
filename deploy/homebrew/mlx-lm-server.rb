# `make dist` writes it to dist/ with the address and the hash of a release, for a tap.
class MlxLmServer < Formula
  include Language::Python::Virtualenv

  desc "LLM serving on MLX, behind the APIs of OpenAI and Anthropic"
  homepage "https://github.com/ml-explore/mlx-lm"
  url "@URL@"
  sha256 "@SHA256@"
  license "MIT"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.13"

  # MLX is wheels alone, so all dependencies are: the pinned ones, with their hashes.
  def install
    virtualenv_create(libexec, "python3.13")
    pip = ["python3.13", "-m", "pip", "--python=#{libexec}/bin/python", "install", "--quiet"]
    system(*pip, "--require-hashes", "--requirement", buildpath/"requirements/serve.txt")
    system(*pip, "--no-deps", buildpath)
    bin.install_symlink libexec/"bin/mlx-lm-server"
  end

  service do
    run [opt_bin/"mlx-lm-server", "--host", "127.0.0.1"]
    keep_alive crashed: true
    log_path var/"log/mlx-lm-server.log"
    error_log_path var/"log/mlx-lm-server.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/mlx-lm-server --version")
  end
end
